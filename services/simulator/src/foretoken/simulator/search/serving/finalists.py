"""Candidates, simulated request by request at the load they are proposed for and at others."""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain import schema
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import CapacityProbe, Finalist, LatencyLimit, ServingTargets
from foretoken.domain.results.report import Feasibility, ServingReport, SteadyWindow
from foretoken.simulator.cluster.fleet import pool_scenarios
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces
from foretoken.simulator.cost.surface import LatencySurfaces, SurfaceSpec
from foretoken.simulator.search.capacity.probe import make_judge
from foretoken.simulator.search.context import SearchContext
from foretoken.simulator.search.serving.candidate_scenario import (
    CandidateLoad,
    CandidateMaker,
)
from foretoken.simulator.search.serving.steady import (
    find_warm_up,
    is_steady,
    measure_between,
    take_requests,
)
from foretoken.simulator.serving.draft import list_surface_specs
from foretoken.simulator.serving.metrics import is_completed
from foretoken.simulator.serving.occupancy import find_interval
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.simulation import PreparedDeployment, prepare_deployment
from foretoken.simulator.workload.requests import resolve_workload

# Shares of the load that a finalist is proposed for: its curve, to beyond the limit.
OTHER_RATIOS = (0.25, 0.5, 0.75, 1.25)
# How those are run: filled beyond what it carries a deployment takes longer to become steady.
_NUM_ROUNDS, _NUM_ROUNDS_BEYOND, _NUM_MEASURED = 3, 8, 400
# How often a run that is not steady yet at the load proposed is warmed up for longer.
_MAX_LONGER = 2
# What is reported of each load where the targets limit no latency; far beyond any.
_SHOWN_METRICS, _UNLIMITED_MS = ("ttft_ms", "tpot_ms"), 1e12
_SHOWN_PERCENTILE = 99
# Fine surfaces kept from one search to the next.
_MAX_KEPT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadTask:
    """A scenario to simulate, of which the deployment is `num_parts`.

    The last `num_measured` requests before as many as are under way are those that count; all where
    `num_under_way` is 0. With `wants_report` all that is known of the run is asked for, and it is
    run until it is steady.
    """

    scenario: ServingScenario
    num_parts: int
    num_under_way: int
    num_measured: int
    wants_report: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadBasis:
    """What all tasks share: the surfaces of their engines, and the targets.

    The surfaces reach contexts of `longest_tokens`, or the model's most.
    """

    surfaces: tuple[tuple[SurfaceSpec, LatencySurfaces], ...]
    targets: ServingTargets
    longest_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOutcome:
    """A simulated load: what the deployment had of each target, and a report of its part.

    The report is there where it was asked for.
    """

    probe: CapacityProbe
    report: ServingReport


def simulate_load(task: LoadTask, basis: LoadBasis) -> LoadOutcome:
    """Return what users see of a deployment under a load, once that is steady.

    Raises:
        InvalidRequestError: the deployment cannot be simulated.

    """
    scenario = task.scenario
    known = dict(basis.surfaces)
    plan = resolve_workload(scenario.workload, scenario.slo_classes, scenario.seed)
    deployment = prepare_deployment(scenario, known.__getitem__, basis.longest_tokens)
    report = ServingReport(num_requests=plan.num_requests, scenario_json=encode_scenario(scenario))
    if deployment.infeasibility:
        feasibility = Feasibility(is_feasible=False, reason=deployment.infeasibility)
        return LoadOutcome(
            probe=CapacityProbe(rate_rps=0.0, is_met=False),
            report=replace(report, feasibility=feasibility),
        )
    run = _run_steadily(deployment, task)
    verdict = make_judge(_shown_targets(basis.targets), scenario).judge(run.steady)
    probe = CapacityProbe(
        rate_rps=run.window.request_throughput_rps * task.num_parts,
        is_met=verdict.is_met,
        num_requests=len(run.steady.requests.arrival_ns),
        output_throughput_tps=run.window.output_throughput_tps * task.num_parts,
        outcomes=tuple(
            replace(outcome, limit=0.0) if outcome.limit == _UNLIMITED_MS else outcome
            for outcome in verdict.outcomes
        ),
    )
    if task.wants_report:
        report = replace(deployment.report(run.record, report), steady=run.window)
    return LoadOutcome(probe=probe, report=report)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SteadyRun:
    """A run, the requests of it that count, and the figures of their time."""

    record: ServingRecord
    steady: ServingRecord
    window: SteadyWindow


def _run_steadily(deployment: PreparedDeployment, task: LoadTask) -> _SteadyRun:
    """Return a run that was warmed up until it was steady, or as long as is reasonable."""
    workload = task.scenario.workload
    num_longer = _MAX_LONGER
    while True:
        plan = resolve_workload(workload, task.scenario.slo_classes, task.scenario.seed)
        record = deployment.run(plan, lambda _: None)
        if task.num_under_way == 0:
            return _SteadyRun(record=record, steady=record, window=_whole_window(record))
        end = plan.num_requests - task.num_under_way
        first = end - task.num_measured
        steady = take_requests(record, first, end)
        # Before every place of a loop was used once, none is steady.
        begun = min(task.num_under_way, first)
        warm_up = begun + find_warm_up(take_requests(record, begun, end))
        if num_longer == 0 or (warm_up <= first and is_steady(steady)):
            window = measure_between(record, first, end, is_loop=plan.concurrency > 0)
            return _SteadyRun(record=record, steady=steady, window=window)
        num_longer -= 1
        workload = replace(workload, num_requests=plan.num_requests + max(first, end // 2))


def _whole_window(record: ServingRecord) -> SteadyWindow:
    """Return the rates of a whole run."""
    duration_s = find_interval(record).duration_s
    if not duration_s:
        return SteadyWindow()
    done = is_completed(record.requests)
    tokens = float(np.asarray(record.requests.num_decode_tokens)[done].sum())
    return replace(
        measure_between(record, 0, len(done)),
        request_throughput_rps=float(done.sum()) / duration_s,
        output_throughput_tps=tokens / duration_s,
    )


def encode_scenario(scenario: ServingScenario) -> str:
    """Return a scenario as JSON."""
    return json.dumps(schema.encode(scenario))


class CandidateRuns:
    """Simulates candidates; surfaces it asked the predictor for serve the next search."""

    def __init__(self, predictor: PredictorPort) -> None:
        self._predictor = predictor
        self._kept: OrderedDict[tuple[SurfaceSpec, str], LatencySurfaces] = OrderedDict()

    def run(
        self,
        maker: CandidateMaker,
        names: Mapping[int, str],
        ratios: Sequence[float],
        context: SearchContext,
    ) -> Iterator[tuple[int, tuple[LoadOutcome, ...]]]:
        """Yield each candidate's row with its outcomes at all ratios, once they are there.

        `names` are of rows of the points. There is a report at a ratio of 1 only.

        Raises:
            CancelledJobError: the job was cancelled.

        """
        rows = list(names)
        tasks = [
            _make_task(maker, row, name, ratio) for row, name in names.items() for ratio in ratios
        ]
        # Loads draw different numbers of requests, the longest of which decides for all.
        longest = max(
            (_longest_tokens(task.scenario) for task in tasks), default=maker.load.longest
        )
        basis = LoadBasis(
            surfaces=self._surfaces([task.scenario for task in tasks], maker, longest),
            targets=maker.request.targets,
            longest_tokens=longest,
        )
        if not tasks:
            yield from ((row, ()) for row in rows)
        done: dict[int, LoadOutcome] = {}
        for index, outcome in context.run(simulate_load, tasks, basis):
            done[index] = outcome
            number = index // len(ratios)
            places = range(number * len(ratios), (number + 1) * len(ratios))
            if all(place in done for place in places):
                yield rows[number], tuple(done[place] for place in places)

    def _surfaces(
        self, scenarios: Sequence[ServingScenario], maker: CandidateMaker, longest_tokens: int
    ) -> tuple[tuple[SurfaceSpec, LatencySurfaces], ...]:
        longest = min(longest_tokens, maker.request.scenario.model.max_position)
        specs = dict.fromkeys(
            spec
            for one in scenarios
            for pool in pool_scenarios(one)
            for spec in list_surface_specs(pool, longest)
            if spec is not None
        )
        version = maker.answers.model_version
        found = []
        for spec in specs:
            surfaces = self._kept.get((spec, version))
            if surfaces is None:
                surfaces = fetch_surfaces(spec, self._predictor)
                self._kept[spec, surfaces.model_version] = surfaces
            found.append((spec, surfaces))
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return tuple(found)


def _longest_tokens(scenario: ServingScenario) -> int:
    """Return the longest prompt of a workload with its answer."""
    plan = resolve_workload(scenario.workload, scenario.slo_classes, scenario.seed)
    return int((plan.num_prefill_tokens + plan.num_decode_tokens).max())


def make_finalist(
    maker: CandidateMaker, name: tuple[int, str], rank: int, outcomes: Sequence[LoadOutcome]
) -> Finalist:
    """Return a candidate, by its row and name, that was simulated as proposed and then otherwise.

    The report is of one of its parts, whose scenario it has; the curve is of all, by rising load.
    """
    row, title = name
    proposed = outcomes[0]
    others = [outcome.probe for outcome in outcomes[1:]]
    num_below = sum(ratio < 1 for ratio in OTHER_RATIOS) if others else 0
    return Finalist(
        candidate=row,
        name=title,
        rank=rank,
        is_met=proposed.probe.is_met,
        report=proposed.report,
        outcomes=proposed.probe.outcomes,
        load=(*others[:num_below], proposed.probe, *others[num_below:]),
        scenario_json=encode_scenario(maker.scenario(row, title)),
    )


def _make_task(maker: CandidateMaker, row: int, name: str, ratio: float) -> LoadTask:
    load = CandidateLoad(ratio=ratio, num_parts=maker.count_parts(row))
    if ratio != 1.0:
        num_rounds = _NUM_ROUNDS_BEYOND if ratio > 1.0 else _NUM_ROUNDS
        load = replace(load, num_rounds=num_rounds, num_measured=_NUM_MEASURED)
    return LoadTask(
        scenario=maker.scenario(row, name, load),
        num_parts=load.num_parts,
        num_under_way=maker.count_under_way(row, load),
        num_measured=maker.count_measured(row, load),
        wants_report=ratio == 1.0,
    )


def _shown_targets(targets: ServingTargets) -> ServingTargets:
    if targets.limits:
        return targets
    shown = tuple(
        LatencyLimit(metric=metric, percentile=_SHOWN_PERCENTILE, limit_ms=_UNLIMITED_MS)
        for metric in _SHOWN_METRICS
    )
    return replace(targets, limits=shown)
