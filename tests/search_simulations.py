"""Simulations as tasks of a search; apart, for other tasks need not import what simulates."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.frameworks.engine import DEFAULT_PROFILE, find_engine
from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import plan_requests


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A simulation of so many requests at a rate."""

    seed: int
    rate_rps: float
    num_requests: int = 20


def simulate(load: Load, tables: CostTables) -> NDArray[np.int64]:
    """Return when the first tokens of a random load leave a small engine."""
    rng = np.random.default_rng(load.seed)
    gaps = rng.exponential(1e9 / load.rate_rps, load.num_requests)
    plan = plan_requests(
        np.cumsum(gaps).astype(np.int64),
        rng.integers(10, 200, load.num_requests),
        rng.integers(1, 30, load.num_requests),
    )
    setup = DeploymentSetup(profile=find_engine(DEFAULT_PROFILE), num_kv_blocks=500)
    return run_deployment(plan, setup, tables, _ignore).requests.first_token_ns


def _ignore(_done_ratio: float) -> None:
    pass
