"""Whether a run meets the targets: the figures of its full report that they ask for, no others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.registry import ATTAINMENT
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import LatencyLimit, LimitOutcome, ServingTargets
from foretoken.domain.requests.slo import Slo
from foretoken.domain.units import NS_PER_MS
from foretoken.simulator.serving.attainment import find_attaining
from foretoken.simulator.serving.metrics import (
    PlacedRuns,
    count_token_gaps,
    instants_of,
    measure,
    place_runs,
)
from foretoken.simulator.serving.percentile import describe
from foretoken.simulator.serving.record import RequestOutcome, RequestRecord, ServingRecord
from foretoken.simulator.workload.request_plan import RequestPlan

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
        end_ns = np.minimum(runs.end_ns, unseen.horizon_ns)
        figures = _Figures(replace(requests, **clipped), replace(runs, end_ns=end_ns), unseen)
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
