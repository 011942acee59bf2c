"""Simulate a serving deployment from its scenario to its report and tables."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import Feasibility, ServingReport
from foretoken.domain.units import NS_PER_US
from foretoken.jobs.runner import JobProgress
from foretoken.simulator.cluster.fleet import make_fleet, pool_scenarios
from foretoken.simulator.cluster.record import record_cluster
from foretoken.simulator.cluster.setup import (
    ClusterSetup,
    ResolvedPool,
    as_cluster,
    check_cluster,
    set_up_cluster,
    set_up_engines,
)
from foretoken.simulator.cluster.simulation import Cluster
from foretoken.simulator.cost.latency_surfaces import LatencySurfaces, SurfaceSpec
from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.engine.pool import EnginePool
from foretoken.simulator.engine.simulation import EngineRun
from foretoken.simulator.serving.compilation import compile_apart, must_compile
from foretoken.simulator.serving.draft import (
    StepCosts,
    add_draft_cost,
    check_speculation,
    encoder_surface_spec,
    list_surface_specs,
    time_drafts,
)
from foretoken.simulator.serving.feasibility import judge_feasibility
from foretoken.simulator.serving.lora import assign_adapters
from foretoken.simulator.serving.outcome import build_report, rate_of
from foretoken.simulator.serving.record import ServingRecord, count_group_tokens
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.step_cost import SurfaceCost
from foretoken.simulator.serving.tables import build_tables
from foretoken.simulator.workload.request_plan import RequestPlan, find_first
from foretoken.simulator.workload.requests import resolve_workload

# Of a cluster progress is reported so many times as requests are done, and after so many instants.
_NUM_REPORTS, _REPORT_INTERVAL = 200, 1000
# Called now and then with the share of requests that are done; raises to cancel.
Progress = Callable[[float], None]


class ClusterRun:
    """A cluster with the requests of a plan, from the first on; `tables` are one per pool."""

    def __init__(
        self, plan: RequestPlan, setup: ClusterSetup, tables: Sequence[CostTables]
    ) -> None:
        """Set it up.

        Raises:
            UnknownPluginError: there is no scheduler, router or autoscaler of that name.

        """
        pools = [
            EnginePool(plan, pool, each) for pool, each in zip(setup.pools, tables, strict=True)
        ]
        self._plan = plan
        self._cluster = Cluster(plan, setup, pools)
        # Requests from the first on that are done, with no other between them.
        self._num_in_turn = 0

    def go_on(self, num_first: int, progress: Progress) -> None:
        """Simulate until the first `num_first` requests are done; to the end for all."""
        cluster, num_requests = self._cluster, self._plan.num_requests
        num_instants, reported = 0, cluster.num_done

        def is_enough() -> bool:
            nonlocal num_instants, reported
            num_instants += 1
            is_new = (cluster.num_done - reported) * _NUM_REPORTS >= num_requests
            if is_new or num_instants % _REPORT_INTERVAL == 0:
                reported = cluster.num_done
                progress(reported / num_requests)
            return num_first < num_requests and self._are_done(num_first)

        if not is_enough():
            cluster.run(is_enough)

    def send_no_more(self) -> None:
        """Let a closed loop end with the requests that have been sent."""
        self._cluster.send_no_more()

    def record(self) -> ServingRecord:
        """Return what the cluster did until now; of requests that are not done what is so far."""
        return record_cluster(self._plan, self._cluster)

    def _are_done(self, num_first: int) -> bool:
        journeys = self._cluster.journeys
        while self._num_in_turn < num_first and journeys[self._num_in_turn].outcome:
            self._num_in_turn += 1
        return self._num_in_turn >= num_first


def run_deployment(
    plan: RequestPlan, setup: DeploymentSetup, tables: CostTables, progress: Progress
) -> ServingRecord:
    """Return what the engines did with the requests of a plan.

    Raises:
        UnknownPluginError: there is no scheduler of that name, or engines do not know the router.

    """
    return _run_all(EngineRun(plan, setup, tables), plan, progress)


def run_cluster(
    plan: RequestPlan, setup: ClusterSetup, tables: Sequence[CostTables], progress: Progress
) -> ServingRecord:
    """Return what a cluster did with the requests of a plan; `tables` are one per pool.

    Raises:
        UnknownPluginError: there is no scheduler, router or autoscaler of that name.

    """
    return _run_all(ClusterRun(plan, setup, tables), plan, progress)


def _run_all(run: EngineRun | ClusterRun, plan: RequestPlan, progress: Progress) -> ServingRecord:
    run.go_on(plan.num_requests, progress)
    return run.record()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentRun:
    """A deployment that serves a plan from its first request on, a part of it at a time."""

    engines: EngineRun | ClusterRun
    groups: Sequence[range]

    def go_on(self, num_first: int, progress: Progress) -> None:
        """Simulate until the first `num_first` requests of the plan are done; to the end for all.

        It may go on a little longer.
        """
        self.engines.go_on(num_first, progress)

    def send_no_more(self) -> None:
        """Let a closed loop end with the requests that have been sent."""
        self.engines.send_no_more()

    def record(self) -> ServingRecord:
        """Return what happened until now; of requests that are not done what is so far."""
        return count_group_tokens(self.engines.record(), self.groups)


FetchSurfaces = Callable[[SurfaceSpec], LatencySurfaces]

# The tables of a simulation, in the order of their detail.
SERVING_TABLES = ("requests", "steps", "series")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingResult:
    """A report and the tables it sums up, by name; none where the deployment cannot run."""

    report: ServingReport
    tables: Mapping[str, pa.Table] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedDeployment:
    """A deployment that can run any number of plans; `pools` of a cluster, or its one kind.

    Where `infeasibility` says why it cannot run, it has neither setup nor costs.
    """

    scenario: ServingScenario
    pools: Sequence[ResolvedPool]
    infeasibility: str = ""
    setup: DeploymentSetup | ClusterSetup | None = None
    costs: Sequence[StepCosts] = ()
    model_version: str = ""
    notes: tuple[str, ...] = ()

    def compile(self, say: Callable[[str], None]) -> None:
        """Have the engine compiled where it is not kept from before.

        What happens is said several times a second meanwhile; what `say` raises ends it.
        """
        if self.setup is not None and must_compile(self.setup):
            compile_apart(self.setup, lambda: say("compile the engine, once on this machine"))

    def run(self, plan: RequestPlan, progress: Callable[[float], None]) -> ServingRecord:
        """Return what the engines did with the requests of a plan; raises as `start`."""
        run = self.start(plan)
        run.go_on(plan.num_requests, progress)
        return run.record()

    def start(self, plan: RequestPlan) -> DeploymentRun:
        """Return the deployment before it is sent the first request of a plan.

        Raises:
            InvalidRequestError: the deployment cannot run.
            UnknownPluginError: no such scheduler, router or autoscaling policy.

        """
        setup = self.setup
        plan = assign_adapters(plan, self.scenario.lora, self.scenario.seed)
        if setup is None:
            raise InvalidRequestError.of_field("scenario", f"cannot run: {self.infeasibility}")
        engines = (
            ClusterRun(plan, setup, [cost.tables for cost in self.costs])
            if isinstance(setup, ClusterSetup)
            else EngineRun(plan, setup, self.costs[0].tables)
        )
        return DeploymentRun(engines=engines, groups=_groups_of(setup))

    def report(self, record: ServingRecord, known: ServingReport) -> ServingReport:
        """Return what a run tells besides what is known of it, without its bulk columns."""
        known = replace(known, model_version=self.model_version, notes=self.notes)
        fleet = make_fleet(self.scenario, record)
        accounts = [
            cost.account(record.steps[engine])
            for pool, cost in zip(fleet, self.costs, strict=True)
            for engine in pool.engines
        ]
        memories = [pool.memories for pool in self.pools]
        return build_report(known, self.scenario, record, accounts, memories)

    def tables(self, record: ServingRecord) -> Mapping[str, pa.Table]:
        """Return the tables of a run by name."""
        return build_tables(record, self.scenario, [cost.breakdown for cost in self.costs])


def prepare_deployment(
    scenario: ServingScenario,
    fetch: FetchSurfaces,
    longest_tokens: int,
    request_tokens: float = 0.0,
) -> PreparedDeployment:
    """Return a deployment that can run, or why it cannot.

    `fetch` returns the latency surfaces of an engine and is called once for pools that are alike,
    `longest_tokens` is the longest prompt with its answer, `request_tokens` the mean of both (0: as
    many as the model takes). With LoRA adapters a deployment without
    pools is one of one pool, whose replicas load them.

    Raises:
        InvalidRequestError: the engine's limits, the cluster or the model cannot be used.
        UnknownDeviceError, UnknownPluginError: no such device or engine.

    """
    if scenario.lora is not None and scenario.cluster is None:
        scenario = as_cluster(scenario)
    check_cluster(scenario)
    pools = []
    for part in pool_scenarios(scenario):
        check_speculation(part)
        engine = part.resolve_engine()
        memories, reason = judge_feasibility(part, engine, request_tokens=request_tokens)
        pools.append(ResolvedPool(scenario=part, engine=engine, memories=memories))
        if reason:
            reason = f"pool {part.name}: {reason}" if scenario.cluster else reason
            return PreparedDeployment(scenario=scenario, pools=pools, infeasibility=reason)
    # First, for it refuses what needs no estimates.
    setup = _set_up(scenario, pools)
    longest = min(longest_tokens, scenario.model.max_position)
    specs = [list_surface_specs(pool.scenario, longest) for pool in pools]
    wanted = [spec for own_and_draft in specs for spec in own_and_draft if spec is not None]
    surfaces = {spec: fetch(spec) for spec in dict.fromkeys(wanted)}
    encoder = encoder_surface_spec(scenario, longest)
    encoding_us = fetch(encoder).encoding_us if encoder else 0.0
    found = {spec: SurfaceCost(each) for spec, each in surfaces.items()}
    costs = [
        add_draft_cost(found[own], found[draft] if draft else None, scenario.speculative)
        for own, draft in specs
    ]
    return PreparedDeployment(
        scenario=scenario,
        pools=pools,
        setup=_time_encoders(_time_drafts(setup, costs), encoding_us),
        costs=costs,
        model_version=surfaces[specs[0][0]].model_version,
        notes=tuple(dict.fromkeys(note for each in surfaces.values() for note in each.notes)),
    )


def simulate_serving(
    scenario: ServingScenario, fetch: FetchSurfaces, progress: JobProgress
) -> ServingResult:
    """Return what users of a deployment would see.

    A layout that does not fit the model or the device's memory is a result with its reason.
    `fetch` returns the latency surfaces of an engine.

    Raises:
        InvalidRequestError: the engine's limits, the cluster, the workload or the model cannot be
            used.
        UnknownDeviceError, UnknownPluginError: no such device, engine, router, autoscaling policy
            or arrival process.
        CancelledJobError: the job was cancelled.

    """
    plan = resolve_workload(scenario.workload, scenario.slo_classes, scenario.seed)
    report = ServingReport(num_requests=plan.num_requests, scenario_json=resolved_json(scenario))
    progress.update(0.02, "ask the predictor")
    longest = int((plan.num_prefill_tokens + plan.num_decode_tokens).max())
    deployment = prepare_deployment(scenario, fetch, longest, plan.mean_tokens)
    if deployment.infeasibility:
        feasibility = Feasibility(is_feasible=False, reason=deployment.infeasibility)
        report = replace(report, feasibility=feasibility, offered_rps=_planned_rps(plan))
        return ServingResult(report=report)
    num_requests = plan.num_requests

    def advance(done_ratio: float) -> None:
        num_done = round(done_ratio * num_requests)
        progress.update(0.1 + 0.8 * done_ratio, f"{num_done} of {num_requests} requests")

    deployment.compile(lambda message: progress.update(0.1, message))
    record = deployment.run(plan, advance)
    progress.update(0.95, "sum up")
    return ServingResult(report=deployment.report(record, report), tables=deployment.tables(record))


def set_up_deployment(
    scenario: ServingScenario, engine: EngineProfile, memories: Sequence[ServingMemory]
) -> DeploymentSetup:
    """Return the engines of a scenario; data-parallel ones share experts in lock step or nothing.

    Those in lock step are one server's, whose load balancer sees their queues (vLLM, v1/engine,
    DPLBAsyncMPClient); others are behind a round robin. `memories` as in `set_up_engines`.
    """
    layout = scenario.layout
    return replace(
        set_up_engines(scenario, engine, memories),
        num_engines=layout.dp,
        is_lock_step=layout.shares_experts,
        router="least_loaded" if layout.shares_experts else "round_robin",
    )


def _set_up(
    scenario: ServingScenario, pools: Sequence[ResolvedPool]
) -> DeploymentSetup | ClusterSetup:
    if scenario.cluster is not None:
        return set_up_cluster(scenario, pools)
    return set_up_deployment(scenario, pools[0].engine, pools[0].memories)


def _time_drafts(
    setup: DeploymentSetup | ClusterSetup, costs: Sequence[StepCosts]
) -> DeploymentSetup | ClusterSetup:
    if isinstance(setup, DeploymentSetup):
        return time_drafts(setup, costs[0])
    pools = [
        replace(pool, engines=time_drafts(pool.engines, cost))
        for pool, cost in zip(setup.pools, costs, strict=True)
    ]
    return replace(setup, pools=tuple(pools))


def _time_encoders(
    setup: DeploymentSetup | ClusterSetup, encoding_us: float
) -> DeploymentSetup | ClusterSetup:
    if isinstance(setup, DeploymentSetup) or setup.encoders is None:
        return setup
    encoders = replace(setup.encoders, encode_ns=round(encoding_us * NS_PER_US))
    return replace(setup, encoders=encoders)


def _groups_of(setup: DeploymentSetup | ClusterSetup) -> list[range]:
    """Return the engines that are in lock step with each other, counted through all pools."""
    if isinstance(setup, DeploymentSetup):
        return [range(setup.num_engines)] if setup.is_lock_step else []
    groups = []
    first = 0
    for pool in setup.pools:
        size = pool.engines_per_replica
        end = first + pool.engines.num_engines
        if pool.engines.is_lock_step:
            groups += [range(start, start + size) for start in range(first, end, size)]
        first = end
    return groups


def _planned_rps(plan: RequestPlan) -> float:
    """Return the rate of arrivals where it does not depend on answers, else 0."""
    is_open = plan.concurrency == 0 and bool(find_first(plan.follows, plan.joins).all())
    return rate_of(plan.arrival_ns) if is_open else 0.0


def resolved_json(scenario: ServingScenario) -> str:
    """Return the configuration that a result is kept with."""
    # Inline requests are in the table of requests already, arrival by arrival.
    workload = replace(scenario.workload, trace_requests=())
    return json.dumps(schema.encode(replace(scenario, workload=workload)))
