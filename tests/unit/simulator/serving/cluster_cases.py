"""Small clusters whose times can be computed by hand.

A step takes 5 µs and 0.5 µs for each token: a prompt of 10 tokens 10 µs, a decode step of one
request 5.5 µs. KV caches are 100 bytes a token; a port of `SLOW_PORT` sends 10 tokens in 10 µs.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.cluster.setup import ClusterSetup, KvTransferSetup, PoolSetup
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_cluster
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests

SLOW_PORT = 1e8
US = 1e-6
PROFILE = EngineProfile(name="plain", engine="plain")


def plan_of(*rows: tuple[float, int, int]) -> RequestPlan:
    """Return requests: (arrival in µs, prompt, answer)."""
    arrival, prefill, decode = np.array(rows).T
    to_int = [np.asarray(column, dtype=np.int64) for column in (arrival * 1e3, prefill, decode)]
    return plan_requests(*to_int)


def pool_of(name: str = "pool", **fields: Any) -> PoolSetup:
    """Return a pool; `num_kv_blocks`, `num_engines` and `profile` are its engines'."""
    engines = DeploymentSetup(
        profile=fields.pop("profile", PROFILE),
        num_kv_blocks=fields.pop("num_kv_blocks", 100),
        num_engines=fields.pop("num_engines", fields.get("num_replicas", 1)),
    )
    return PoolSetup(name=name, engines=engines, **fields)


def pair_of(*, latency_ns: int = 0, overlaps_prefill: bool = False, **decode: Any) -> ClusterSetup:
    """Return a prefill and a decode pool of one replica each; `decode` changes the latter."""
    port = decode.setdefault("port_bytes_per_s", float("inf"))
    return ClusterSetup(
        pools=(
            pool_of("prefill", role=PoolRole.PREFILL, port_bytes_per_s=port),
            pool_of("decode", role=PoolRole.DECODE, **decode),
        ),
        kv_transfer=KvTransferSetup(
            bytes_per_token=100,
            latency_ns=latency_ns,
            overlaps_prefill=overlaps_prefill,
            num_layers=4,
        ),
    )


def run(plan: RequestPlan, setup: ClusterSetup, **changes: Any) -> ServingRecord:
    """Return what a cluster, with changes, does with the requests."""
    tables = [flat_tables(5.0, 0.5)] * len(setup.pools)
    return run_cluster(plan, replace(setup, **changes), tables, lambda _: None)


def times_us(times_ns: Any) -> list[float]:
    """Return times in µs."""
    return [float(time) / 1e3 for time in times_ns]
