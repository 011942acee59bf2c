"""The simulation of a deployment in plain Python: all rules, and what compiled code must equal."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from foretoken.domain.cluster import RoutingSpec
from foretoken.simulator import cost_tables
from foretoken.simulator.cost_tables import CostTables
from foretoken.simulator.serving.batch import Batch
from foretoken.simulator.serving.cluster import Cluster
from foretoken.simulator.serving.cluster_record import record_cluster
from foretoken.simulator.serving.cluster_setup import ClusterSetup, PoolSetup
from foretoken.simulator.serving.engine_pool import EnginePool
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.reference_pool import ReferencePool
from foretoken.simulator.serving.replica_group import StepCost
from foretoken.simulator.serving.request_plan import RequestPlan
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.speculation import Speculation, draft_shapes

# Progress is reported so many times as requests are done, and after so many instants.
_NUM_REPORTS, _REPORT_INTERVAL = 200, 1000


def _uncompile(module: ModuleType) -> dict[str, Any]:
    """Return the names of a module with its compiled functions as plain Python again."""
    names = dict(vars(module))
    for name, value in vars(module).items():
        if hasattr(value, "py_func"):
            names[name] = FunctionType(value.py_func.__code__, names, name)
    return names


_PLAIN = _uncompile(cost_tables)


class TableCost:
    """The cost of steps as tables give it, computed without compiling anything.

    With speculation a step has the passes of the draft in it.
    """

    def __init__(self, tables: CostTables, speculation: Speculation | None = None) -> None:
        self._tables = tables
        self._draft = speculation.draft if speculation else None
        self._num_drafts = speculation.num_draft_tokens if speculation else 0

    @property
    def num_stages(self) -> int:
        """Pipeline stages of an engine."""
        return len(self._tables.tokens_us)

    def stage_us(self, batch: Batch) -> list[float]:
        """Return the time of a step on each stage, in µs."""
        tokens = np.array([tokens for _, tokens, _ in batch.prefills], dtype=np.int64)
        context = np.array([context for *_, context in batch.prefills], dtype=np.int64)
        shape = batch.shape
        stages_us = [
            _PLAIN["stage_us"](self._tables, stage, shape, tokens, context)
            for stage in range(self.num_stages)
        ]
        if self._draft is not None:
            # Models with a draft are on one stage.
            for each in draft_shapes(shape, tokens + context, self._num_drafts):
                stages_us[0] += _PLAIN["stage_us"](self._draft, 0, each, tokens, context)
        return stages_us

    def shared_us(self, stage: int, num_tokens: int, num_seqs: int) -> float:
        """Return what engines in lock step take together, by tokens and requests of all, in µs."""
        shared_us = float(_PLAIN["shared_us"](self._tables, stage, num_tokens))
        if self._draft is not None and stage == 0:
            shared_us += float(_PLAIN["shared_us"](self._draft, stage, num_tokens))
            other_us = float(_PLAIN["shared_us"](self._draft, stage, num_seqs))
            shared_us += (self._num_drafts - 1) * other_us
        return shared_us


def run_reference(
    plan: RequestPlan,
    setup: DeploymentSetup,
    cost: StepCost,
    progress: Callable[[float], None],
) -> ServingRecord:
    """Return what the engines did with the requests.

    Raises:
        UnknownPluginError: there is no scheduler or no router of that name.
        RuntimeError: requests run that the scheduler does not schedule.

    """
    cluster = cluster_of(setup)
    pools = [ReferencePool(plan, pool, cost) for pool in cluster.pools]
    record = run_pools(plan, cluster, pools, progress)
    return replace(
        record,
        requests=replace(
            record.requests, prefill_engine=None, transferred_ns=None, num_retries=None
        ),
        tokens=replace(record.tokens, engine=None),
        pools=(),
    )


def cluster_of(setup: DeploymentSetup) -> ClusterSetup:
    """Return a deployment as a cluster: engines in lock step are one replica, others one each."""
    size = setup.num_engines if setup.is_lock_step else 1
    num_replicas = setup.num_engines // size
    pool = PoolSetup(name="", engines=setup, num_replicas=num_replicas, engines_per_replica=size)
    router = "round_robin" if setup.is_lock_step else setup.router
    return ClusterSetup(pools=(pool,), routing=RoutingSpec(router=router))


def run_pools(
    plan: RequestPlan,
    setup: ClusterSetup,
    pools: Sequence[EnginePool],
    progress: Callable[[float], None],
) -> ServingRecord:
    """Return what the pools of a cluster did with the requests."""
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
