"""The simulation of a deployment in plain Python: all rules, and what compiled code must equal."""

from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.simulator import cost_tables
from foretoken.simulator.cost_tables import CostTables, Ints
from foretoken.simulator.serving.batch import Batch, SchedulerFactory
from foretoken.simulator.serving.cluster import Cluster
from foretoken.simulator.serving.content import BlockNames
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.kv_store import KvStore
from foretoken.simulator.serving.record import (
    RequestRecord,
    ServingRecord,
    StepRecord,
    TokenRuns,
)
from foretoken.simulator.serving.replica import Replica
from foretoken.simulator.serving.replica_group import ReplicaGroup, StepCost
from foretoken.simulator.serving.request import SimRequest
from foretoken.simulator.serving.request_plan import RequestPlan
from foretoken.simulator.serving.routing import Router
from foretoken.simulator.serving.setup import DeploymentSetup

# Instants between two reports of progress.
_REPORT_INTERVAL = 1000


def _uncompile(module: ModuleType) -> dict[str, Any]:
    """Return the names of a module with its compiled functions as plain Python again."""
    names = dict(vars(module))
    for name, value in vars(module).items():
        if hasattr(value, "py_func"):
            names[name] = FunctionType(value.py_func.__code__, names, name)
    return names


_PLAIN = _uncompile(cost_tables)


class TableCost:
    """The cost of steps as tables give it, computed without compiling anything."""

    def __init__(self, tables: CostTables) -> None:
        self._tables = tables

    @property
    def num_stages(self) -> int:
        """Pipeline stages of an engine."""
        return len(self._tables.tokens_us)

    def stage_us(self, batch: Batch) -> list[float]:
        """Return the time of a step on each stage, in µs."""
        tokens = np.array([tokens for _, tokens, _ in batch.prefills], dtype=np.int64)
        context = np.array([context for *_, context in batch.prefills], dtype=np.int64)
        shape = batch.shape
        return [
            _PLAIN["stage_us"](self._tables, stage, shape, tokens, context)
            for stage in range(self.num_stages)
        ]

    def shared_us(self, stage: int, num_tokens: int) -> float:
        """Return what engines in lock step take together, by the tokens of all, in µs."""
        return float(_PLAIN["shared_us"](self._tables, stage, num_tokens))


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
    replicas = [_build_replica(plan, setup, cost.num_stages) for _ in range(setup.num_engines)]
    teams = [replicas] if setup.is_lock_step else [[replica] for replica in replicas]
    cluster = Cluster(
        plan,
        setup.profile,
        [ReplicaGroup(setup.profile, team, cost) for team in teams],
        _find_router(setup.router),
        setup.max_context,
    )
    num_instants = 0

    def watch() -> None:
        nonlocal num_instants
        num_instants += 1
        if num_instants % _REPORT_INTERVAL == 0:
            progress(cluster.num_done / plan.num_requests)

    cluster.run(watch)
    return ServingRecord(
        requests=_requests_of(cluster.requests, plan),
        tokens=_runs_of(cluster.requests),
        steps=[_steps_of(replica) for replica in replicas],
        num_kv_blocks=setup.num_kv_blocks,
        block_size=setup.profile.block_size,
    )


def find_scheduler(name: str) -> SchedulerFactory:
    """Return the plug-in of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    found = scan_modules("foretoken.simulator.serving.schedulers", "SCHEDULER")
    factory: SchedulerFactory = UnknownPluginError.look_up(name, found)
    return factory


def _find_router(name: str) -> Router:
    found = scan_modules("foretoken.simulator.serving.routers", "ROUTER")
    router: Router = UnknownPluginError.look_up(name, found)()
    return router


def _build_replica(plan: RequestPlan, setup: DeploymentSetup, num_stages: int) -> Replica:
    rules = setup.profile
    names = BlockNames(plan, rules.block_size) if rules.has_prefix_caching else None
    store = None
    if setup.kv_tiers:
        store = KvStore(setup.kv_tiers, setup.kv_bytes_per_token * rules.block_size)
    kv = KvCache(setup.num_kv_blocks, rules.block_size, names, store)
    return Replica(rules, find_scheduler(rules.scheduler)(rules), kv, num_stages)


def _requests_of(requests: Sequence[SimRequest], plan: RequestPlan) -> RequestRecord:
    def column(name: str) -> Ints:
        return np.array([getattr(request, name) for request in requests], dtype=np.int64)

    return RequestRecord(
        arrival_ns=column("arrival_ns"),
        queued_ns=column("queued_ns"),
        scheduled_ns=column("scheduled_ns"),
        first_token_ns=column("first_token_ns"),
        finished_ns=column("finished_ns"),
        num_prefill_tokens=column("num_prefill_tokens"),
        num_decode_tokens=column("num_decode_tokens"),
        num_preemptions=column("num_preemptions"),
        num_cached_tokens=column("num_cached"),
        num_loaded_tokens=column("num_loaded"),
        engine=column("engine"),
        slo_class=plan.slo_class,
        outcome=column("outcome"),
    )


def _runs_of(requests: Sequence[SimRequest]) -> TokenRuns:
    runs = [(request.index, *run) for request in requests for run in request.token_runs]
    request, first_step, stride, count = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    return TokenRuns(request=request, first_step=first_step, stride=stride, count=count)


def _steps_of(replica: Replica) -> StepRecord:
    rows = [
        (scheduled_ns, start_ns, end_ns, *step.shape, *step[2:])
        for step, scheduled_ns, start_ns, end_ns in replica.steps
    ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 13).T
    prefills = [
        (index, request.index, tokens, context)
        for index, (step, *_) in enumerate(replica.steps)
        for request, tokens, context in step.batch.prefills
    ]
    prefill_columns = np.array(prefills, dtype=np.int64).reshape(-1, 4).T
    return StepRecord(
        scheduled_ns=columns[0],
        start_ns=columns[1],
        end_ns=columns[2],
        num_tokens=columns[3],
        num_rows=columns[4],
        num_decodes=columns[5],
        decode_kv_tokens=columns[6],
        decode_kv_tokens_max=columns[7],
        num_prefills=columns[8],
        num_running=columns[9],
        num_waiting=columns[10],
        num_used_blocks=columns[11],
        num_preempted=columns[12],
        prefill_step=prefill_columns[0],
        prefill_request=prefill_columns[1],
        prefill_tokens=prefill_columns[2],
        prefill_context=prefill_columns[3],
    )
