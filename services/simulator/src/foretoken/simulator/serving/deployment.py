"""The simulation of a deployment, from its first request to the last."""

from collections.abc import Callable, Sequence

import numpy as np

from foretoken.simulator.cluster.record import record_cluster
from foretoken.simulator.cluster.setup import ClusterSetup
from foretoken.simulator.cluster.simulation import Cluster
from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.engine.pool import EnginePool
from foretoken.simulator.engine.simulation import is_ready, run_engines
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests

# Of a cluster progress is reported so many times as requests are done, and after so many instants.
_NUM_REPORTS, _REPORT_INTERVAL = 200, 1000
# Called now and then with the share of requests that are done; raises to cancel.
Progress = Callable[[float], None]


def run_deployment(
    plan: RequestPlan, setup: DeploymentSetup, tables: CostTables, progress: Progress
) -> ServingRecord:
    """Return what the engines did with the requests of a plan.

    Raises:
        UnknownPluginError: there is no scheduler of that name, or engines do not know the router.

    """
    return run_engines(plan, setup, tables, progress)


def run_cluster(
    plan: RequestPlan, setup: ClusterSetup, tables: Sequence[CostTables], progress: Progress
) -> ServingRecord:
    """Return what a cluster did with the requests of a plan; `tables` are one per pool.

    Raises:
        UnknownPluginError: there is no scheduler, router or autoscaler of that name.

    """
    pools = [EnginePool(plan, pool, each) for pool, each in zip(setup.pools, tables, strict=True)]
    cluster = Cluster(plan, setup, pools)
    num_requests = plan.num_requests
    num_instants, reported = 0, 0

    def watch() -> None:
        nonlocal num_instants, reported
        num_instants += 1
        is_new = (cluster.num_done - reported) * _NUM_REPORTS >= num_requests
        if is_new or num_instants % _REPORT_INTERVAL == 0:
            reported = cluster.num_done
            progress(reported / num_requests)

    cluster.run(watch)
    return record_cluster(plan, cluster)


def must_compile(setup: DeploymentSetup | ClusterSetup) -> bool:
    """Whether a plan waits for the compiler first: the code is not kept from before."""
    if isinstance(setup, DeploymentSetup):
        return not is_ready(setup)
    return not all(EnginePool.is_ready(pool.engines) for pool in setup.pools)


def warm_up(setup: DeploymentSetup, tables: CostTables) -> None:
    """Compile what runs a deployment, or load it where that was done before."""
    one = np.ones(1, dtype=np.int64)
    run_engines(plan_requests(one, one, one), setup, tables, lambda _: None)


def warm_up_pools(tables: CostTables) -> None:
    """Compile what runs the pools of clusters, or load it where that was done before."""
    EnginePool.compile(tables)
