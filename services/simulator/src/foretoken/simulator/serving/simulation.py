"""Simulate a serving deployment from its scenario to its report and tables."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from foretoken.domain import schema
from foretoken.domain.engine import DEFAULT_PROFILE, EngineProfile, find_engine
from foretoken.domain.job_runner import JobProgress
from foretoken.domain.memory import ServingMemory
from foretoken.domain.report import Feasibility, ServingReport
from foretoken.domain.scenario import ServingScenario
from foretoken.simulator.cost_tables import flat_tables
from foretoken.simulator.latency_surfaces import LatencySurfaces, SurfaceSpec, surface_spec
from foretoken.simulator.report.tables import build_tables
from foretoken.simulator.serving.deployment import must_compile, run_deployment, warm_up
from foretoken.simulator.serving.feasibility import count_kv_blocks, judge_feasibility
from foretoken.simulator.serving.outcome import build_report, rate_of
from foretoken.simulator.serving.record import count_group_tokens
from foretoken.simulator.serving.request_plan import NONE, RequestPlan
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.workload import resolve_workload
from foretoken.simulator.step_cost import SurfaceCost

FetchSurfaces = Callable[[SurfaceSpec], LatencySurfaces]

# The tables of a simulation, in the order of their detail.
SERVING_TABLES = ("requests", "steps", "series")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingResult:
    """A report and the tables it sums up, by name; none where the deployment cannot run."""

    report: ServingReport
    tables: Mapping[str, pa.Table] = field(default_factory=dict)


def simulate_serving(
    scenario: ServingScenario, fetch: FetchSurfaces, progress: JobProgress
) -> ServingResult:
    """Return what users of a deployment would see.

    A layout that does not fit the model or the device's memory is a result with its reason.
    `fetch` returns the latency surfaces of a deployment.

    Raises:
        InvalidRequestError: the engine's limits, the workload or the model cannot be used.
        UnknownDeviceError, UnknownPluginError: no such device, engine or arrival process.
        CancelledJobError: the job was cancelled.

    """
    engine = scenario.engine.resolve()
    plan = resolve_workload(scenario.workload, scenario.slo_classes, scenario.seed)
    report = ServingReport(num_requests=plan.num_requests, scenario_json=_resolved_json(scenario))
    memories, reason = judge_feasibility(scenario, engine)
    if reason:
        feasibility = Feasibility(is_feasible=False, reason=reason)
        report = replace(report, feasibility=feasibility, offered_rps=_planned_rps(plan))
        return ServingResult(report=report)
    progress.update(0.02, "ask the predictor")
    longest = int((plan.num_prefill_tokens + plan.num_decode_tokens).max())
    surfaces = fetch(surface_spec(scenario, min(longest, scenario.model.max_position)))
    cost = SurfaceCost(surfaces)
    num_requests = plan.num_requests

    def advance(done_ratio: float) -> None:
        num_done = round(done_ratio * num_requests)
        progress.update(0.1 + 0.8 * done_ratio, f"{num_done} of {num_requests} requests")

    setup = set_up_deployment(scenario, engine, memories)
    if must_compile(plan, setup):
        progress.update(0.1, "compile the engine, once on this machine")
    record = run_deployment(plan, setup, cost.tables, advance)
    if setup.is_lock_step:
        record = count_group_tokens(record)
    progress.update(0.95, "sum up")
    report = replace(report, model_version=surfaces.model_version)
    accounts = [cost.account(steps) for steps in record.steps]
    report = build_report(report, scenario, record, accounts, memories)
    return ServingResult(report=report, tables=build_tables(record, scenario, cost.breakdown))


def compile_engines() -> None:
    """Compile what runs large simulations, or load it where that was done before."""
    setup = DeploymentSetup(profile=find_engine(DEFAULT_PROFILE), num_kv_blocks=1)
    warm_up(setup, flat_tables())


def set_up_deployment(
    scenario: ServingScenario, engine: EngineProfile, memories: Sequence[ServingMemory]
) -> DeploymentSetup:
    """Return the engines of a scenario; data-parallel ones share experts in lock step or nothing.

    Those in lock step are one server's, whose load balancer sees their queues (vLLM, v1/engine,
    DPLBAsyncMPClient); others are behind a round robin. `memories` are of one rank of every
    pipeline stage; each moves its own part of the KV cache.

    On several stages a request is in one batch at a time, asynchronous scheduling or not: the first
    stage needs the token that leaves the last.
    """
    layout = scenario.layout
    if layout.pp > 1:
        engine = replace(engine, has_async_scheduling=False)
    shares_experts = layout.dp > 1 and layout.ep > 1
    return DeploymentSetup(
        profile=engine,
        num_kv_blocks=count_kv_blocks(scenario, engine, memories),
        num_engines=layout.dp,
        is_lock_step=shares_experts,
        router="least_loaded" if shares_experts else "round_robin",
        max_context=scenario.model.max_position,
        kv_bytes_per_token=round(max(memory.kv_bytes_per_token for memory in memories)),
        kv_tiers=scenario.engine.kv_tiers,
    )


def _planned_rps(plan: RequestPlan) -> float:
    """Return the rate of arrivals where it does not depend on answers, else 0."""
    is_open = plan.concurrency == 0 and bool((plan.follows == NONE).all())
    return rate_of(plan.arrival_ns) if is_open else 0.0


def _resolved_json(scenario: ServingScenario) -> str:
    # Inline requests are in the table of requests already, arrival by arrival.
    workload = replace(scenario.workload, trace_requests=())
    return json.dumps(schema.encode(replace(scenario, workload=workload)))
