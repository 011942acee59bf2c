"""Random clusters: few small pools, under failures, scaling, limits and slow links of all kinds."""

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st
from serving_strategies import BYTES_PER_TOKEN, make_tables, plans, profiles, tiers

from foretoken.domain.requests.cluster import (
    AutoscalingSpec,
    FailureSpec,
    ReplicaOutage,
    RoutingSpec,
)
from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.cluster.record import record_cluster
from foretoken.simulator.cluster.setup import (
    AdapterSetup,
    ClusterSetup,
    KvTransferSetup,
    PoolSetup,
)
from foretoken.simulator.cluster.simulation import Cluster
from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.engine.pool import EnginePool
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import RequestPlan

_ROUTERS = ("round_robin", "least_outstanding", "power_of_two", "prefix_affinity", "random")
_SCHEDULERS = (
    "chunked_prefill",
    "chunked_prefill",
    "sglang",
    "vllm_v0",
    "lightllm",
    "trtllm",
    "sarathi",
    "orca",
    "static_batch",
)
_US = 1e-6


@dataclass(frozen=True)
class ClusterCase:
    """A workload, and the cluster it runs on."""

    plan: RequestPlan
    setup: ClusterSetup
    tables: tuple[CostTables, ...] = field(repr=False)

    def run(self) -> tuple[ServingRecord, Cluster]:
        """Return what the cluster did, and the cluster as it is in the end."""
        pools = [
            EnginePool(self.plan, pool, tables)
            for pool, tables in zip(self.setup.pools, self.tables, strict=True)
        ]
        cluster = Cluster(self.plan, self.setup, pools)
        cluster.run(lambda: None)
        return record_cluster(self.plan, cluster), cluster


@st.composite
def cluster_cases(draw: st.DrawFn) -> ClusterCase:
    """Draw a workload and a cluster, all aggregated or disaggregated."""
    plan = _with_priorities(draw, draw(plans()))
    roles: list[PoolRole] = [PoolRole.AGGREGATED] * draw(st.integers(1, 2))
    if draw(st.booleans()):
        roles = [PoolRole.PREFILL, PoolRole.DECODE]
        roles += draw(st.sampled_from(([], [PoolRole.DECODE], [PoolRole.PREFILL])))
    pools = [draw(_pools(plan, role, f"pool {place}")) for place, role in enumerate(roles)]
    setup = ClusterSetup(
        pools=pools,
        routing=draw(_routings()),
        decode_routing=replace(draw(_routings()), max_queued=0),
        kv_transfer=KvTransferSetup(
            bytes_per_token=100.0,
            latency_ns=draw(st.sampled_from((0, 700))),
            overlaps_prefill=draw(st.booleans()),
            num_layers=4,
        ),
        failures=draw(st.none() | _failures([pool.name for pool in pools])),
        seed=draw(st.integers(0, 3)),
    )
    tables = tuple(make_tables(draw(st.sampled_from((0.5, 5.0))), 1) for _ in pools)
    return ClusterCase(plan, setup, tables)


def _with_priorities(draw: st.DrawFn, plan: RequestPlan) -> RequestPlan:
    """Return the plan with classes of two priorities and with adapters."""
    count = plan.num_requests
    columns = st.lists(st.integers(0, 1), min_size=count, max_size=count)
    return replace(
        plan,
        priority=np.array(draw(columns), dtype=np.int64),
        adapter=np.array(draw(columns), dtype=np.int64) - 1,
    )


@st.composite
def _pools(draw: st.DrawFn, plan: RequestPlan, role: PoolRole, name: str) -> PoolSetup:
    profile = draw(profiles(draw(st.sampled_from(_SCHEDULERS))))
    profile = replace(profile, has_priority_scheduling=draw(st.booleans()))
    longest = int((plan.num_prefill_tokens + plan.num_decode_tokens).max())
    num_needed = -(-longest // profile.block_size)
    size = draw(st.sampled_from((1, 1, 2)))
    num_replicas, num_more = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    scaling = st.builds(
        AutoscalingSpec,
        policy=st.sampled_from(("queue_length", "target_concurrency")),
        min_replicas=st.just(1),
        max_replicas=st.just(num_replicas + num_more),
        interval_s=st.sampled_from((20 * _US, 100 * _US)),
        cold_start_s=st.sampled_from((0.0, 40 * _US)),
        options=st.just({"target": "2", "scale_down_window_s": "0"}),
    )
    return PoolSetup(
        name=name,
        role=role,
        engines=DeploymentSetup(
            profile=profile,
            num_kv_blocks=max(1, int(num_needed * draw(st.sampled_from((0.8, 1, 1.3, 3, 10))))),
            num_engines=(num_replicas + num_more) * size,
            is_lock_step=size > 1,
            router="least_loaded",
            max_context=draw(st.sampled_from((80, 10**6))),
            kv_bytes_per_token=BYTES_PER_TOKEN,
            kv_tiers=() if role is PoolRole.DECODE else draw(tiers(profile)),
        ),
        num_replicas=num_replicas,
        engines_per_replica=size,
        port_bytes_per_s=draw(st.sampled_from((float("inf"), 1e9, 1e8))),
        autoscaling=draw(st.none() | scaling),
        adapters=draw(st.none() | st.just(AdapterSetup(max_loaded=1, load_ns=3_000))),
    )


@st.composite
def _routings(draw: st.DrawFn) -> RoutingSpec:
    return RoutingSpec(
        router=draw(st.sampled_from(_ROUTERS)),
        load_interval_ms=draw(st.sampled_from((0.0, 0.0, 0.01))),
        max_outstanding=draw(st.sampled_from((0, 1, 3))),
        max_queued=draw(st.sampled_from((0, 0, 1, 3))),
    )


@st.composite
def _failures(draw: st.DrawFn, names: list[str]) -> FailureSpec:
    outages = st.builds(
        ReplicaOutage,
        pool=st.sampled_from(names),
        replica=st.integers(0, 2),
        start_s=st.sampled_from((0.0, 30 * _US, 80 * _US)),
        restart_s=st.sampled_from((5 * _US, 60 * _US)),
    )
    return FailureSpec(
        mtbf_s=draw(st.sampled_from((0.0, 100 * _US, 400 * _US))),
        restart_s=draw(st.sampled_from((10 * _US, 100 * _US))),
        max_retries=draw(st.integers(0, 3)),
        retry_delay_s=draw(st.sampled_from((0.0, 7 * _US))),
        outages=tuple(draw(st.lists(outages, max_size=2))),
    )
