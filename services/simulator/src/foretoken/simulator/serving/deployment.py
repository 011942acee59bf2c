"""The simulation of a deployment, from its first request to the last."""

from collections.abc import Callable, Sequence

import numpy as np

from foretoken.simulator.cost_tables import CostTables
from foretoken.simulator.serving.cluster_setup import ClusterSetup, PoolFactory, PoolSetup
from foretoken.simulator.serving.engine_pool import EnginePool
from foretoken.simulator.serving.fast.pool import FastPool
from foretoken.simulator.serving.fast.selection import SELECTS
from foretoken.simulator.serving.fast.simulation import is_ready, run_fast
from foretoken.simulator.serving.fast.state import ROUTERS
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.reference import TableCost, run_pools, run_reference
from foretoken.simulator.serving.reference_pool import ReferencePool
from foretoken.simulator.serving.request_plan import RequestPlan, plan_requests
from foretoken.simulator.serving.setup import DeploymentSetup

# Up to so many output tokens a plan is the reference's: it takes 0.1 s, as long as loading the fast
# path; where that is yet to be compiled, 2 s, which even many runs in a row can bear.
_TINY_TOKENS, _SMALL_TOKENS = 5_000, 100_000
# Called now and then with the share of requests that are done; raises to cancel.
Progress = Callable[[float], None]
# Whether something holds of a deployment.
_Judge = Callable[[DeploymentSetup], bool]


def run_deployment(
    plan: RequestPlan, setup: DeploymentSetup, tables: CostTables, progress: Progress
) -> ServingRecord:
    """Return what the engines did with the requests of a plan.

    Raises:
        UnknownPluginError: there is no scheduler or no router of that name.

    """
    if takes_fast_path(plan, setup):
        return run_fast(plan, setup, tables, progress)
    return run_reference(plan, setup, TableCost(tables, setup.speculation), progress)


def run_cluster(
    plan: RequestPlan,
    setup: ClusterSetup,
    tables: Sequence[CostTables],
    progress: Progress,
    make: PoolFactory | None = None,
) -> ServingRecord:
    """Return what a cluster did with the requests of a plan; `tables` are one per pool.

    Raises:
        UnknownPluginError: there is no scheduler, router or autoscaler of that name.

    """
    make = make or make_pool
    pools = [make(plan, pool, each) for pool, each in zip(setup.pools, tables, strict=True)]
    return run_pools(plan, setup, pools, progress)


def make_pool(plan: RequestPlan, setup: PoolSetup, tables: CostTables) -> EnginePool:
    """Return the engines of a pool, compiled where that is the faster and knows all rules."""
    if _takes(plan, setup.engines, has_fast_pool, FastPool.is_ready):
        return FastPool(plan, setup, tables)
    return ReferencePool(plan, setup, TableCost(tables, setup.engines.speculation))


def takes_fast_path(plan: RequestPlan, setup: DeploymentSetup) -> bool:
    """Whether compiled code runs the plan: as the setup says, else if it is the faster.

    It is not for a tiny plan, nor for a small one if it has to be compiled first.
    """
    return _takes(plan, setup, has_fast_path, is_ready)


def _takes(plan: RequestPlan, setup: DeploymentSetup, knows: _Judge, is_compiled: _Judge) -> bool:
    if setup.uses_fast_path is not None:
        return setup.uses_fast_path
    num_tokens = _num_tokens(plan, setup)
    if not knows(setup) or num_tokens <= _TINY_TOKENS:
        return False
    return num_tokens > _SMALL_TOKENS or is_compiled(setup)


def must_compile(plan: RequestPlan, setup: DeploymentSetup) -> bool:
    """Whether the plan waits for the compiler first: its code is not kept from before."""
    return takes_fast_path(plan, setup) and not is_ready(setup)


def must_compile_cluster(plan: RequestPlan, setup: ClusterSetup) -> bool:
    """Whether a plan waits for the compiler before a cluster runs it."""
    return any(
        _takes(plan, pool.engines, has_fast_pool, FastPool.is_ready)
        and not FastPool.is_ready(pool.engines)
        for pool in setup.pools
    )


def warm_up(setup: DeploymentSetup, tables: CostTables) -> None:
    """Compile what runs a deployment, or load it where that was done before."""
    one = np.ones(1, dtype=np.int64)
    if has_fast_path(setup):
        run_fast(plan_requests(one, one, one), setup, tables, lambda _: None)


def warm_up_pools(tables: CostTables) -> None:
    """Compile what runs the pools of clusters, or load it where that was done before."""
    FastPool.compile(tables)


def _num_tokens(plan: RequestPlan, setup: DeploymentSetup) -> float:
    """Return how much there is to simulate, in output tokens."""
    num_prefill = plan.num_prefill_tokens.sum() / setup.profile.max_num_batched_tokens
    return float(plan.num_decode_tokens.sum() + num_prefill + plan.num_requests)


def has_fast_path(setup: DeploymentSetup) -> bool:
    """Whether compiled code knows all rules of a deployment; else the reference has to run it."""
    return setup.router in ROUTERS and has_fast_pool(setup)


def has_fast_pool(setup: DeploymentSetup) -> bool:
    """Whether compiled code knows all rules of engines that a cluster gives requests to."""
    return setup.profile.scheduler in SELECTS
