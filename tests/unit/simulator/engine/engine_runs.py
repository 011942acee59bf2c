"""A run of every scheduler under pressure, with tiers, swapping or drafts; prints what it did."""

import json
import sys
from dataclasses import fields, replace

import numpy as np

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.engine.choice import list_schedulers
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.serving.speculation import Speculation
from foretoken.simulator.workload.request_plan import plan_requests

_NUM_REQUESTS = 12
_TIER = KvTier(name="tier", capacity_bytes=2_000, read_bytes_per_s=1e8, write_bytes_per_s=1e8)
_DRAFTS = Speculation(
    acceptance_ratios=(0.6,) * 3,
    num_lookahead_tokens=3,
    draft=flat_tables(1.0, 0.1),
)


def run_all() -> dict[str, dict[str, list[int]]]:
    """Return the columns of the requests and steps of each run, by scheduler and what it has."""
    return {
        f"{scheduler} with {feature}": _run(scheduler, feature)
        for scheduler in list_schedulers()
        for feature in ("tiers", "swapping", "drafts")
    }


def _run(scheduler: str, feature: str) -> dict[str, list[int]]:
    rng = np.random.default_rng(len(scheduler))
    plan = plan_requests(
        np.cumsum(rng.integers(0, 9_000, _NUM_REQUESTS)),
        rng.integers(10, 60, _NUM_REQUESTS),
        rng.integers(5, 40, _NUM_REQUESTS),
    )
    profile = EngineProfile(
        name="drawn",
        engine="drawn",
        scheduler=scheduler,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=4,
        preemption="swap" if feature == "swapping" else "recompute",
        has_prefix_caching=feature == "tiers",
        host_us=3.0,
        output_us_per_seq=2.0,
    )
    setup = DeploymentSetup(
        profile=profile,
        num_kv_blocks=30,
        kv_bytes_per_token=10,
        kv_tiers=() if feature == "drafts" else (_TIER,),
        speculation=_DRAFTS if feature == "drafts" else None,
    )
    plan = replace(plan, stream=np.arange(_NUM_REQUESTS) % 3)
    record = run_deployment(plan, setup, flat_tables(5.0, 0.7), lambda _: None)
    return {
        f"{type(part).__name__}.{column.name}": getattr(part, column.name).tolist()
        for part in (record.requests, record.steps[0], record.tokens)
        for column in fields(part)
        if getattr(part, column.name) is not None
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_all()))
