"""Finalists: simulated over the steady part of their runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import CapacityProbe, Finalist, LatencyLimit, ServingTargets
from foretoken.domain.results.report import Feasibility, ServingReport, SteadyWindow
from foretoken.domain.units import MS_PER_S
from foretoken.simulator.cost.surface import LatencySurfaces, SurfaceSpec
from foretoken.simulator.cost.surface_cache import SurfaceCache
from foretoken.simulator.grid import Floats
from foretoken.simulator.search.capacity.probe import make_judge
from foretoken.simulator.search.context import SearchContext
from foretoken.simulator.search.serving.candidate_scenario import (
    CandidateLoad,
    CandidateMaker,
)
from foretoken.simulator.serving.draft import list_all_specs
from foretoken.simulator.serving.metrics import is_completed
from foretoken.simulator.serving.occupancy import find_interval
from foretoken.simulator.serving.outcome import judge_refusals
from foretoken.simulator.serving.record import RequestRecord, ServingRecord, TokenRuns
from foretoken.simulator.serving.service_level import measure_window
from foretoken.simulator.serving.simulation import (
    PreparedDeployment,
    prepare_deployment,
    resolved_json,
)
from foretoken.simulator.workload.request_plan import RequestPlan
from foretoken.simulator.workload.requests import resolve_workload

# Where the means of a steady part's halves are closer than this, it is steady.
_STEADY_RATIO = 0.05
# Rounds of a closed loop in each of them at the least: what filled it comes by again, and only over
# some rounds one sees it go.
_NUM_COMPARED = 2
# Observations of a batch. Source: MSER-5, White, Cobb and Spratt (2000), "A comparison of five
# steady-state truncation heuristics for simulation".
_BATCH = 5


def take_requests(record: ServingRecord, first: int, end: int) -> ServingRecord:
    """Return a record with the requests from `first` to before `end` only, all steps left in it.

    Token runs are of those requests, whose numbers count from 0 again.
    """
    requests = record.requests
    columns = {item.name: getattr(requests, item.name) for item in fields(RequestRecord)}
    taken: dict[str, Any] = {
        name: column if column is None else np.asarray(column)[first:end]
        for name, column in columns.items()
    }
    runs = record.tokens
    numbers = np.asarray(runs.request)
    chosen = (numbers >= first) & (numbers < end)
    columns = {item.name: getattr(runs, item.name) for item in fields(TokenRuns)}
    kept: dict[str, Any] = {
        name: column if column is None else np.asarray(column)[chosen]
        for name, column in columns.items()
    }
    kept["request"] = numbers[chosen] - first
    return replace(record, requests=RequestRecord(**taken), tokens=TokenRuns(**kept))


def measure_between(
    record: ServingRecord, first: int, end: int, *, is_loop: bool = False
) -> SteadyWindow:
    """Return the figures of the time from the arrival of request `first` to that of `end`.

    Where there is none of that number, to the last arrival. Of a closed loop the rates are what is
    under way over how long each request is: Little's law. Completions that are counted come near it
    only over very many rounds, for those begun before the window and those left after it are never
    as many. Source: Glynn and Whitt (1989), "Indirect estimation via L = lambda W".
    """
    arrival = np.asarray(record.requests.arrival_ns)
    start_ns, end_ns = int(arrival[first:end].min()), int(arrival[first : end + 1].max())
    if end_ns <= start_ns:
        return SteadyWindow()
    window = measure_window(record, start_ns, end_ns)
    if not is_loop or not window.e2e_latency_ms.mean:
        return window
    rate_rps = mean_under_way(record, start_ns, end_ns) / window.e2e_latency_ms.mean * MS_PER_S
    came = (arrival >= start_ns) & (arrival < end_ns) & is_completed(record.requests)
    answers = np.asarray(record.requests.num_decode_tokens)[came]
    return replace(
        window,
        request_throughput_rps=rate_rps,
        output_throughput_tps=rate_rps * float(answers.mean()),
    )


def mean_under_way(record: ServingRecord, start_ns: int, end_ns: int) -> float:
    """Return how many requests are under way on average from one time to another."""
    arrival, finished = np.asarray(record.requests.arrival_ns), record.requests.finished_ns
    # What is not answered is not under way.
    ended = np.where(np.asarray(finished) < 0, arrival, finished)
    inside = np.minimum(ended, end_ns) - np.maximum(arrival, start_ns)
    return float(np.maximum(inside, 0).sum()) / (end_ns - start_ns)


def find_warm_up(record: ServingRecord) -> int:
    """Return how many of the first requests are still of the warm-up; all where it never ends.

    Leaving them out makes the mean of the others' waits and answers as sure as it gets: MSER-5. Of
    one for which no place in the first half is better than its end, none is steady.
    """
    return max(_truncate(span_ns) for span_ns in _spans_ns(record))


def _truncate(span_ns: Floats) -> int:
    """Return where the standard error of what is left is least."""
    num = len(span_ns) // _BATCH
    if num == 0:
        return len(span_ns)
    batches = span_ns[: num * _BATCH].reshape(num, _BATCH).mean(axis=1)
    batches -= batches.mean()
    left = np.arange(num, 0, -1)
    total, squares = (np.cumsum(each[::-1])[::-1] for each in (batches, batches**2))
    errors = np.maximum(squares - total**2 / left, 0.0) / left**2
    # Few batches have little spread by chance, so only those of the first half are looked at.
    best = int(np.argmin(errors[: num // 2 + 1]))
    return best * _BATCH if best < max(num // 2, 1) else len(span_ns)


def _spans_ns(record: ServingRecord) -> tuple[Floats, Floats]:
    """Return how long requests that are done waited for their first token, then for the rest."""
    requests = record.requests
    done = np.asarray(requests.finished_ns) >= 0
    first_ns = (np.asarray(requests.first_token_ns) - requests.arrival_ns)[done]
    answer_ns = (np.asarray(requests.finished_ns) - requests.first_token_ns)[done]
    return first_ns.astype(np.float64), answer_ns.astype(np.float64)


def is_steady(record: ServingRecord, num_round: int = 1) -> bool:
    """Whether requests that came later waited, and were answered, about as long as those before.

    Where both means of the second half of the requests are within 5 % of the first half's. What
    goes round in a closed loop of `num_round` keeps its place in it, so halves are whole rounds:
    parts of one differ for ever.
    """
    for span_ns in _spans_ns(record):
        half = min(_half(len(span_ns), num_round), len(span_ns) // 2)
        if half == 0:
            return True
        means = span_ns[-2 * half : -half].mean(), span_ns[-half:].mean()
        if abs(means[1] - means[0]) > _STEADY_RATIO * max(means):
            return False
    return True


def _half(num_requests: int, num_round: int) -> int:
    """Return how many of the last requests are compared with as many before them."""
    if num_round == 1:
        return num_requests // 2
    return max(num_requests // 2 // num_round, _NUM_COMPARED) * num_round


# Shares of the load that a finalist is proposed for: its curve, to beyond the limit.
OTHER_RATIOS = (0.25, 0.5, 0.75, 1.25)
# How those are run: filled beyond what it carries a deployment takes longer to become steady.
_NUM_ROUNDS, _NUM_ROUNDS_BEYOND, _NUM_MEASURED = 3, 8, 400
# How often the warm-up of a run is doubled that is not steady yet: at the load proposed, and of a
# closed loop beyond it, which begins with half the rounds.
_NUM_LONGER, _NUM_LONGER_BEYOND = 2, 1
# What is reported of each load where the targets limit no latency; far beyond any.
_SHOWN_METRICS, _UNLIMITED_MS = ("ttft_ms", "tpot_ms"), 1e12
_SHOWN_PERCENTILE = 99
# Fine surfaces kept from one search to the next.
_MAX_KEPT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadTask:
    """A scenario to simulate, of which the deployment is `num_parts`.

    The last `num_measured` requests before as many as are under way are those that count; all where
    `num_under_way` is 0. With `wants_report` all that is known of the run is asked for. The warm-up
    of a run that is not steady is doubled up to `num_longer` times.
    """

    scenario: ServingScenario
    num_parts: int
    num_under_way: int
    num_measured: int
    num_longer: int
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
    deployment = prepare_deployment(
        scenario, known.__getitem__, basis.longest_tokens, plan.mean_tokens
    )
    report = ServingReport(num_requests=plan.num_requests, scenario_json=resolved_json(scenario))
    if deployment.infeasibility:
        why = Feasibility(is_feasible=False, reason=deployment.infeasibility)
        return _cannot_run(report, why)
    run = _run_steadily(deployment, task, plan)
    refused = judge_refusals(run.record, scenario)
    if not refused.is_feasible:
        return _cannot_run(report, refused)
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


def _cannot_run(report: ServingReport, why: Feasibility) -> LoadOutcome:
    probe = CapacityProbe(rate_rps=0.0, is_met=False)
    return LoadOutcome(probe=probe, report=replace(report, feasibility=why))


@dataclass(frozen=True, kw_only=True, slots=True)
class _SteadyRun:
    """A run, the requests of it that count, and the figures of their time."""

    record: ServingRecord
    steady: ServingRecord
    window: SteadyWindow


def _run_steadily(deployment: PreparedDeployment, task: LoadTask, plan: RequestPlan) -> _SteadyRun:
    """Return a run that was warmed up until it was steady, or as long as is reasonable."""
    if task.num_under_way == 0:
        record = deployment.run(plan, _say_nothing)
        return _SteadyRun(record=record, steady=record, window=_whole_window(record))
    num_requests = task.scenario.workload.num_requests
    counts = list_counts(task, num_requests, is_loop=plan.concurrency > 0)
    if plan.concurrency and len(counts) > 1:
        plan = _lengthen(task, counts[-1])
    run = deployment.start(plan)
    for count in counts:
        end = count - task.num_under_way
        first = end - task.num_measured
        if plan.concurrency:
            run.go_on(end, _say_nothing)
        else:
            # Rates are given, and whoever arrives later changes what those before wait for.
            if count != counts[0]:
                plan = _lengthen(task, count)
                run = deployment.start(plan)
            run.go_on(count, _say_nothing)
        record = run.record()
        # Before every place of a loop was used once, none is steady.
        begun = min(task.num_under_way, first)
        warm_up = begun + find_warm_up(take_requests(record, begun, end))
        num_round = task.num_under_way if plan.concurrency else 1
        before = end - 2 * _half(task.num_measured, num_round)
        around = take_requests(record, max(before, begun), end)
        if warm_up <= first and is_steady(around, num_round):
            break
    if task.wants_report and plan.concurrency:
        run.send_no_more()
        run.go_on(plan.num_requests, _say_nothing)
        record = run.record()
        num_sent = int(np.count_nonzero(np.asarray(record.requests.arrival_ns) >= 0))
        record = take_requests(record, 0, num_sent)
    window = measure_between(record, first, end, is_loop=plan.concurrency > 0)
    return _SteadyRun(record=record, steady=take_requests(record, first, end), window=window)


def list_counts(task: LoadTask, num_requests: int, *, is_loop: bool) -> Sequence[int]:
    """Return after how many requests a run may be steady that begins with so many, ascending.

    A closed loop goes on where it is, so one can look after every round.
    """
    counts = [num_requests]
    for _ in range(task.num_longer):
        end = counts[-1] - task.num_under_way
        counts.append(counts[-1] + max(end - task.num_measured, end // 2))
    if not is_loop:
        return counts
    step = max(task.num_under_way, task.num_measured // 2)
    return [*range(counts[0], counts[-1], step), counts[-1]]


def _lengthen(task: LoadTask, num_requests: int) -> RequestPlan:
    """Return the requests of a task's workload made so many."""
    scenario = task.scenario
    workload = replace(scenario.workload, num_requests=num_requests)
    return resolve_workload(workload, scenario.slo_classes, scenario.seed)


def _say_nothing(_: float) -> None:
    pass


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


class CandidateRuns:
    """Simulates candidates; surfaces it asked the predictor for serve the next search."""

    def __init__(self, predictor: PredictorPort) -> None:
        self._fine = SurfaceCache(predictor, _MAX_KEPT)

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
        specs = dict.fromkeys(spec for one in scenarios for spec in list_all_specs(one, longest))
        version = maker.answers.model_version
        return tuple((spec, self._fine.get(spec, version)) for spec in specs)


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
        scenario_json=resolved_json(maker.scenario(row, title)),
    )


def _make_task(maker: CandidateMaker, row: int, name: str, ratio: float) -> LoadTask:
    load = CandidateLoad(ratio=ratio, num_parts=maker.count_parts(row))
    num_longer = _NUM_LONGER if ratio == 1.0 else 0
    if ratio != 1.0:
        num_rounds = _NUM_ROUNDS_BEYOND if ratio > 1.0 else _NUM_ROUNDS
        if ratio > 1.0 and maker.is_loop:
            num_longer = _NUM_LONGER_BEYOND
            num_rounds >>= num_longer
        load = replace(load, num_rounds=num_rounds, num_measured=_NUM_MEASURED)
    return LoadTask(
        scenario=maker.scenario(row, name, load),
        num_parts=load.num_parts,
        num_under_way=maker.count_under_way(row, load),
        num_measured=maker.count_measured(row, load),
        num_longer=num_longer,
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
