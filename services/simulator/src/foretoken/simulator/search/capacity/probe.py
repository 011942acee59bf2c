"""Run a workload at a rate and see whether the targets are met; also with requests drawn anew.

A verdict computes the figures of a full report that its targets name, and no others.

Resampled loads show how far an answer rests on chance. A synthetic workload is drawn with the seeds
after its own. Of a trace, halves are taken: it is cut into blocks of consecutive requests, and half
of them, drawn at random, follow each other as if the others had not been; the other half is a draw
of its own. The answers of such halves spread as those of whole traces do (J. Shao and C. F. J. Wu,
"A general theory for jackknife variance estimation", Annals of Statistics 17, 1989: half of the
data is left out, so the variance needs no scaling), and no request is in a half twice, which would
find its own prompt in the prefix cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple, Protocol

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.registry import ATTAINMENT
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    CapacityProbe,
    LatencyLimit,
    LimitOutcome,
    ServingTargets,
)
from foretoken.domain.requests.slo import Slo
from foretoken.domain.units import NS_PER_MS
from foretoken.simulator.grid import Ints
from foretoken.simulator.search.capacity.rate import (
    draw_plan,
    rate_of_plan,
    stretch_plan,
    take_requests,
)
from foretoken.simulator.serving.metrics import (
    PlacedRuns,
    count_token_gaps,
    describe,
    instants_of,
    is_completed,
    measure,
    place_runs,
)
from foretoken.simulator.serving.occupancy import find_interval
from foretoken.simulator.serving.outcome import rate_of
from foretoken.simulator.serving.record import RequestOutcome, RequestRecord, ServingRecord
from foretoken.simulator.serving.service_level import find_attaining
from foretoken.simulator.workload.request_plan import RequestPlan
from foretoken.simulator.workload.rng import named_stream

# Requests that the deployment rejected or lost under load. Those of a size it can never hold are
# refused at any rate; latencies leave them out.
_TURNED_AWAY = (RequestOutcome.REJECTED, RequestOutcome.LOST)
# A request that is turned away is later than any limit. Finite, so that reports stay numbers.
_NEVER_NS = 10**18
# The margin of a figure of 0, far within any limit.
_FAR_WITHIN = -20.0
_LEAST_MISS = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a run had of each target, and the margin of each.

    A margin is the logarithm of a figure over its limit, of attainment of the requests that miss
    over those that may: at most 0 where the target is met.
    """

    outcomes: tuple[LimitOutcome, ...]
    margins: tuple[float, ...]

    @property
    def is_met(self) -> bool:
        """Whether all targets are."""
        return all(outcome.is_met for outcome in self.outcomes)

    @property
    def margin(self) -> float:
        """The worst margin."""
        return max(self.margins)

    @property
    def worst(self) -> LimitOutcome:
        """The outcome of the worst margin."""
        return self.outcomes[self.margins.index(self.margin)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unseen:
    """What a run of the first requests leaves out.

    `num_of_several_tokens` of the requests have gaps between tokens, `num_token_gaps` together.
    `horizon_ns` is when the first of them arrives.
    """

    num_requests: int
    num_of_several_tokens: int
    num_token_gaps: int
    horizon_ns: int


def count_unseen(plan: RequestPlan, num_seen: int) -> Unseen:
    """Return what a run of the first requests of a plan leaves out, at least one."""
    answers = plan.num_decode_tokens[num_seen:]
    return Unseen(
        num_requests=len(answers),
        num_of_several_tokens=int((answers > 1).sum()),
        num_token_gaps=int((answers - 1).sum()),
        horizon_ns=int(plan.arrival_ns[num_seen]),
    )


class Judge:
    """Judges runs by targets; `slos` are those of the classes in order, then of no class."""

    def __init__(self, targets: ServingTargets, slos: Sequence[Slo]) -> None:
        """Keep what is judged by."""
        self._targets = targets
        self._slos = slos

    def judge(self, record: ServingRecord) -> Verdict:
        """Return the verdict of a whole run.

        Every figure is that of the run's report, to the last bit, where no request was rejected or
        lost; one that was is later than any limit.
        """
        return self._judge(_Figures(record.requests, place_runs(record), None))

    def judge_kindly(self, record: ServingRecord, unseen: Unseen) -> Verdict:
        """Return a verdict of a run of the first requests that is no worse than that of all.

        Until the first unseen request arrives the run is that of all requests; what happens later
        takes no time here, so that no latency is above what it will be.
        """
        requests, runs = record.requests, place_runs(record)
        clipped = {
            name: np.minimum(getattr(requests, name), unseen.horizon_ns)
            for name in ("arrival_ns", "first_token_ns", "finished_ns")
        }
        seen_ns = np.minimum(runs.seen_ns, unseen.horizon_ns)
        figures = _Figures(replace(requests, **clipped), replace(runs, seen_ns=seen_ns), unseen)
        return self._judge(figures)

    def _judge(self, figures: "_Figures") -> Verdict:
        found = [figures.hold(limit) for limit in self._targets.limits]
        if self._targets.slo_attainment_ratio:
            found.append(figures.hold_share(self._targets.slo_attainment_ratio, self._slos))
        return Verdict(
            outcomes=tuple(outcome for outcome, _ in found),
            # Rounding must not put a margin on the other side of its limit.
            margins=tuple(
                min(margin, 0.0) if outcome.is_met else max(margin, _LEAST_MISS)
                for outcome, margin in found
            ),
        )


def make_judge(targets: ServingTargets, scenario: ServingScenario) -> Judge:
    """Return the judge of a scenario's runs.

    Raises:
        InvalidRequestError: attainment is asked for, and no request has an objective.

    """
    slos = (*(item.slo for item in scenario.slo_classes), scenario.slo)
    if targets.slo_attainment_ratio and not any(slo.is_limited for slo in slos):
        raise InvalidRequestError.of_field(
            "targets.slo_attainment_ratio",
            "the scenario has no SLO to attain; set one, such as slo.ttft_ms=2000",
        )
    return Judge(targets, slos)


class _Figures:
    """The figures of a run that targets are about."""

    def __init__(self, requests: RequestRecord, runs: PlacedRuns, unseen: Unseen | None) -> None:
        self._requests, self._runs, self._unseen = requests, runs, unseen
        self._is_away = np.isin(np.asarray(requests.outcome), _TURNED_AWAY)

    def hold(self, limit: LatencyLimit) -> tuple[LimitOutcome, float]:
        """Return a limit's outcome and margin."""
        is_gap = limit.metric == "itl_ms"
        value = self._token_gap_ms(limit) if is_gap else self._latency_ms(limit)
        outcome = LimitOutcome(
            metric=limit.metric,
            percentile=limit.percentile,
            limit=limit.limit_ms,
            value=value,
            is_met=value <= limit.limit_ms,
        )
        return outcome, log(value / limit.limit_ms) if value > 0 else _FAR_WITHIN

    def hold_share(self, least: float, slos: Sequence[Slo]) -> tuple[LimitOutcome, float]:
        """Return the outcome and margin of the share of requests in their objectives.

        In the margin half a request stands for none.
        """
        attains = find_attaining(self._requests, self._runs, slos)
        num_unseen = self._unseen.num_requests if self._unseen else 0
        num_requests = len(attains) + num_unseen
        share = (int(attains.sum()) + num_unseen) / num_requests
        none = 0.5 / num_requests
        outcome = LimitOutcome(metric=ATTAINMENT, limit=least, value=share, is_met=share >= least)
        return outcome, log(max(1 - share, none) / max(1 - least, none))

    def _latency_ms(self, limit: LatencyLimit) -> float:
        requests, unseen = self._requests, self._unseen
        away = self._is_away
        values = measure(limit.metric, instants_of(requests))
        num_unseen = unseen.num_requests if unseen else 0
        if limit.metric == "tpot_ms":
            away = away & (np.asarray(requests.num_decode_tokens) > 1)
            num_unseen = unseen.num_of_several_tokens if unseen else 0
        num_away = int(away.sum())
        if num_away or num_unseen:
            values = np.concatenate(
                (values, np.full(num_away, _NEVER_NS), np.zeros(num_unseen, dtype=np.int64))
            )
        summary, quantiles = describe(values / NS_PER_MS, None, (limit.percentile,))
        return _pick(summary.mean, quantiles, limit.percentile)

    def _token_gap_ms(self, limit: LatencyLimit) -> float:
        gaps_ns, counts = count_token_gaps(self._runs)
        answers = np.asarray(self._requests.num_decode_tokens)[self._is_away]
        num_away = int(np.maximum(answers - 1, 0).sum())
        num_unseen = self._unseen.num_token_gaps if self._unseen else 0
        if num_away or num_unseen:
            gaps_ns = np.append(gaps_ns, (_NEVER_NS, 0))
            counts = np.append(counts, (num_away, num_unseen))
        summary, quantiles = describe(gaps_ns, counts, (limit.percentile,), scale=1 / NS_PER_MS)
        return _pick(summary.mean, quantiles, limit.percentile)


def _pick(mean: float, quantiles: Sequence[float], percentile: float) -> float:
    return quantiles[0] if quantiles and percentile else mean


# Shares of the requests that are run first: a queue that grows shows in the first of them already.
_FIRST_SHARES = (1 / 16, 1 / 4)
# Fewer first requests than this are not worth a run of their own.
_LEAST_FIRST = 64


class Deployment(Protocol):
    """Runs any number of plans of requests."""

    def run(self, plan: RequestPlan, progress: Callable[[float], None]) -> ServingRecord:
        """Return what the engines did; `progress` hears the share of requests that are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests, the rate at which their plan has them arrive, and what runs and judges them."""

    deployment: Deployment
    plan: RequestPlan
    plan_rps: float
    judge: Judge

    def at_rate(self, rate_rps: float) -> RequestPlan:
        """Return the plan with the same requests at another rate."""
        return stretch_plan(self.plan, self.plan_rps / rate_rps)


class Probe(NamedTuple):
    """One run at a rate; of one that was cut short the verdict is kinder than the truth."""

    rate_rps: float
    verdict: Verdict
    num_requests: int
    output_tps: float
    is_cut_short: bool

    @property
    def log_rate(self) -> float:
        """The logarithm of the rate."""
        return log(self.rate_rps)

    @property
    def figures(self) -> CapacityProbe:
        """The probe as reports have it."""
        return CapacityProbe(
            rate_rps=self.rate_rps,
            is_met=self.verdict.is_met,
            is_cut_short=self.is_cut_short,
            num_requests=self.num_requests,
            output_throughput_tps=self.output_tps,
            outcomes=self.verdict.outcomes,
        )


def run_probe(
    load: Load, rate_rps: float, progress: Callable[[float], None], *, may_cut: bool = False
) -> tuple[Probe, ServingRecord]:
    """Return the verdict of the load at a rate, and the run.

    With `may_cut` the first requests are run alone at first. Nothing that arrives later changes
    what happens before, so where so many of them are late that the targets are missed even if all
    others took no time, the rest is not run: the verdict is that of the whole run.
    """
    plan = load.at_rate(rate_rps)
    if may_cut:
        for share in _FIRST_SHARES:
            num_first = round(plan.num_requests * share)
            if num_first < _LEAST_FIRST:
                continue
            first = take_requests(plan, np.arange(num_first))
            record = load.deployment.run(first, progress)
            verdict = load.judge.judge_kindly(record, count_unseen(plan, num_first))
            if not verdict.is_met:
                return _describe(rate_rps, verdict, record, is_cut_short=True), record
    record = load.deployment.run(plan, progress)
    return _describe(rate_rps, load.judge.judge(record), record), record


def _describe(
    rate_rps: float, verdict: Verdict, record: ServingRecord, *, is_cut_short: bool = False
) -> Probe:
    requests = record.requests
    duration_s = find_interval(record).duration_s
    num_tokens = float(np.asarray(requests.num_decode_tokens)[is_completed(requests)].sum())
    return Probe(
        rate_rps=rate_rps,
        verdict=verdict,
        num_requests=len(requests.arrival_ns),
        output_tps=num_tokens / duration_s if duration_s else 0.0,
        is_cut_short=is_cut_short,
    )


# Independent draws of an interval. Of a trace each is a pair of halves, which mirror each other.
NUM_DRAWS = 8
# Blocks of a trace, and the fewest requests of a block.
_NUM_BLOCKS = 16
_LEAST_BLOCK = 4


class Resamples(NamedTuple):
    """A load with other requests of its kind, of which so many are independent."""

    loads: Sequence[Load]
    num_independent: int


def resample_loads(scenario: ServingScenario, load: Load) -> Resamples:
    """Return the load of a scenario with its requests drawn anew; none of too short a trace."""
    if scenario.workload.trace_requests:
        return Resamples(list(_halve(load, scenario.seed)), NUM_DRAWS)
    plans = [draw_plan(scenario, scenario.seed + 1 + index) for index in range(NUM_DRAWS)]
    return Resamples(
        [
            replace(load, plan=plan, plan_rps=rate_of_plan(scenario.workload, plan))
            for plan in plans
        ],
        NUM_DRAWS,
    )


def _halve(load: Load, seed: int) -> Iterator[Load]:
    if load.plan.num_requests < _NUM_BLOCKS * _LEAST_BLOCK:
        return
    stream = named_stream(seed, "halves")
    for _ in range(NUM_DRAWS):
        order = stream.permutation(_NUM_BLOCKS)
        for chosen in (order[::2], order[1::2]):
            half = take_blocks(load.plan, np.sort(chosen), _NUM_BLOCKS)
            half_rps = rate_of(half.arrival_ns)
            if half_rps > 0:
                yield replace(load, plan=half, plan_rps=half_rps)


def take_blocks(plan: RequestPlan, chosen: Ints, num_blocks: int) -> RequestPlan:
    """Return some of equal blocks of consecutive requests, one directly after the other.

    A block lasts until the first arrival of the next one, the last as long as its mean gap is more.
    """
    edges = np.linspace(0, plan.num_requests, num_blocks + 1).astype(np.int64)
    last_ns = plan.arrival_ns[-1]
    mean_gap_ns = (last_ns - plan.arrival_ns[0]) // max(plan.num_requests - 1, 1)
    start_ns = np.append(plan.arrival_ns[edges[:-1]], last_ns + mean_gap_ns)
    length_ns = np.diff(start_ns)[chosen]
    new_start_ns = np.cumsum(length_ns) - length_ns
    counts = np.diff(edges)[chosen]
    rows = np.concatenate([np.arange(edges[block], edges[block + 1]) for block in chosen])
    shift_ns = np.repeat(start_ns[chosen] - new_start_ns, counts)
    taken = take_requests(plan, rows)
    return replace(taken, arrival_ns=taken.arrival_ns - shift_ns)
