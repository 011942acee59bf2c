"""Find the highest rate at which a deployment meets its targets, and how sure that is."""

import time
from dataclasses import replace

import numpy as np

from foretoken.domain.metrics.registry import ATTAINMENT, describe_limit
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    CapacityReport,
    CapacityRequest,
)
from foretoken.domain.results.report import Feasibility, ServingReport
from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.search.capacity.bracket import Bracket
from foretoken.simulator.search.capacity.load_search import (
    BOUNDS,
    AnswerInterval,
    Bound,
    LoadSearch,
    fetch_at_bound,
    list_notes,
)
from foretoken.simulator.search.capacity.probe import Load, Probe, make_judge, resample_loads
from foretoken.simulator.search.capacity.rate import (
    draw_plan,
    estimate_service_rps,
    rate_of_plan,
    stretch_scenario,
)
from foretoken.simulator.search.context import SearchContext
from foretoken.simulator.serving.outcome import judge_refusals
from foretoken.simulator.serving.simulation import (
    FetchSurfaces,
    PreparedDeployment,
    prepare_deployment,
    resolved_json,
)
from foretoken.simulator.workload.request_plan import RequestPlan

_REPORT_AT = 0.97


def find_capacity(
    request: CapacityRequest, fetch: FetchSurfaces, context: SearchContext
) -> CapacityReport:
    """Return the highest rate at which a deployment meets the targets.

    The requests are drawn once; at another rate the same ones arrive closer together or further
    apart. A deployment that cannot run, or meets the targets at no rate, is a result with its
    reason. `fetch` returns the latency surfaces of an engine.

    Raises:
        InvalidRequestError: the workload has no rate (a closed loop), attainment is asked for
            without objectives, or the scenario cannot be used.
        UnknownDeviceError, UnknownPluginError: no such name in the scenario.
        CancelledJobError: the search was cancelled.

    """
    started_s = time.thread_time()
    report = _find(request, fetch, context)
    return replace(report, cpu_s=time.thread_time() - started_s + context.worker_cpu_s)


def _find(request: CapacityRequest, fetch: FetchSurfaces, context: SearchContext) -> CapacityReport:
    scenario = request.scenario
    plan = draw_plan(scenario, scenario.seed)
    plan_rps = rate_of_plan(scenario.workload, plan)
    judge = make_judge(request.targets, scenario)
    context.update(0.0, "ask the predictor")
    deployment = _prepare(scenario, plan, fetch)
    report = CapacityReport(
        num_devices=scenario.num_devices,
        model_version=deployment.model_version,
        scenario_json=resolved_json(scenario),
    )
    if deployment.setup is None:
        return _refuse(report, deployment.infeasibility)
    deployment.compile(lambda message: context.update(0.02, message))
    load = Load(deployment=deployment, plan=plan, plan_rps=plan_rps, judge=judge)
    search = LoadSearch(load, request.tolerance_ratio, request.confidence_ratio, context)
    guess_rps = estimate_service_rps(deployment.setup, _tables(deployment), plan)
    bracket = search.find_bracket(guess_rps, request.max_rps)
    if bracket.met is None or search.record is None:
        report = replace(report, probes=search.figures)
        return _refuse(report, _say_why(search.probes[-1]))
    refused = judge_refusals(search.record, scenario)
    if not refused.is_feasible:
        # Targets are met where nobody is served.
        return replace(report, feasibility=refused)
    interval, resamples = None, None
    if bracket.missed is not None:
        resamples = resample_loads(scenario, load)
        bounds = _bounds(scenario, load, deployment, fetch)
        interval = search.find_interval(bracket.met, bracket.missed, resamples, bounds)
    context.update(_REPORT_AT, "sum up")
    capacity_rps = bracket.met.rate_rps
    at_rate = resolved_json(stretch_scenario(scenario, plan_rps / capacity_rps))
    known = ServingReport(num_requests=plan.num_requests, scenario_json=at_rate)
    at_capacity = deployment.report(search.record, known)
    return replace(
        _add_answer(report, bracket, interval),
        probes=search.figures,
        at_capacity=at_capacity,
        notes=list_notes(
            search.record.requests, capacity_rps, interval, request.tolerance_ratio, resamples
        ),
        usd_per_million_output_tokens=at_capacity.usd_per_million_output_tokens,
    )


def _prepare(
    scenario: ServingScenario, plan: RequestPlan, fetch: FetchSurfaces
) -> PreparedDeployment:
    longest = int((plan.num_prefill_tokens + plan.num_decode_tokens).max())
    return prepare_deployment(scenario, fetch, longest, plan.mean_tokens)


def _tables(deployment: PreparedDeployment) -> list[CostTables]:
    return [cost.tables for cost in deployment.costs]


def _bounds(
    scenario: ServingScenario, load: Load, deployment: PreparedDeployment, fetch: FetchSurfaces
) -> dict[Bound, Load]:
    """Return the load with steps at the bounds of the predictor's interval, where they differ."""
    bounds: dict[Bound, Load] = {}
    for bound in BOUNDS:
        other = _prepare(scenario, load.plan, fetch_at_bound(fetch, bound))
        pairs = zip(_tables(deployment), _tables(other), strict=True)
        if not all(all(map(np.array_equal, *pair)) for pair in pairs):
            bounds[bound] = replace(load, deployment=other)
    return bounds


def _add_answer(
    report: CapacityReport, bracket: Bracket, interval: AnswerInterval | None
) -> CapacityReport:
    met, missed = bracket.met, bracket.missed
    if met is None:
        return report
    rate_rps = met.rate_rps
    report = replace(
        report,
        capacity_rps=rate_rps,
        capacity_rps_per_gpu=rate_rps / max(report.num_devices, 1),
        **(interval or AnswerInterval(*[rate_rps] * 4))._asdict(),
    )
    if missed is None:
        return report
    worst = missed.verdict.worst
    return replace(
        report,
        first_miss_rps=missed.rate_rps,
        limiting=describe_limit(worst.metric, worst.percentile),
    )


def _refuse(report: CapacityReport, reason: str) -> CapacityReport:
    return replace(report, feasibility=Feasibility(is_feasible=False, reason=reason))


def _say_why(lowest: Probe) -> str:
    """Return why not even the lowest rate meets the targets."""
    worst = lowest.verdict.worst
    at_least = "at least " if lowest.is_cut_short else ""
    if worst.metric == ATTAINMENT:
        most = "at most " if lowest.is_cut_short else ""
        miss = f"{most}{worst.value:.1%} of requests meet their SLO, {worst.limit:.1%} are asked"
    else:
        what = describe_limit(worst.metric, worst.percentile)
        miss = f"{what} is {at_least}{worst.value:.4g} ms, the limit {worst.limit:.4g} ms"
    return (
        f"even at {lowest.rate_rps:.3g} requests/s, where requests hardly meet, {miss}; use more or"
        " faster devices, another layout, or looser targets"
    )
