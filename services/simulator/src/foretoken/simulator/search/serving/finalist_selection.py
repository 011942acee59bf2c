"""Which candidates are simulated, and what becomes of the ranks where a simulation disagrees."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import ATTAINMENT, describe_limit
from foretoken.domain.requests.search import LimitOutcome
from foretoken.simulator.search.serving.finalists import LoadOutcome
from foretoken.simulator.search.serving.outcome import ClosedForm
from foretoken.simulator.search.serving.points import mean_latencies
from foretoken.simulator.search.serving.rank import Figures, Ranking, deployment_keys, rank_points
from foretoken.simulator.search.serving.table import name_of

# Simulations for each finalist that is wanted, at the most, and how many of these are of points
# that the closed form finds late.
_MAX_TRIES, _MAX_LATE_TRIES = 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LateCounts:
    """How many points are over a limit on TTFT by no more than the closed form may be wrong.

    Of these `num_simulated` were simulated, which ruled `num_ruled_in` and `num_ruled_out` of them
    in and out; the rest was left to the closed form.
    """

    num_near: int = 0
    num_simulated: int = 0
    num_ruled_in: int = 0
    num_ruled_out: int = 0


class FinalistSelection:
    """The points of a closed form in its order; those whose simulation misses a target are out.

    A simulation says how much more than the closed form's mean a user sees. Points of the same
    deployment that the same factor puts over the limit are out with it. The best of each of the
    best deployments are finalists once their simulations meet the targets.

    Of those that the closed form finds equal, as it does with all that it knows nothing of, the one
    that is answered sooner when simulated comes first.

    Points over a limit on TTFT by no more than the closed form may be wrong compete like those
    within it, best first: their simulation says whether they are out, and points of the same
    deployment with them. Of those that no simulation has judged the closed form holds.
    """

    def __init__(self, form: ClosedForm) -> None:
        order = form.ranking.order
        self._form = form
        self._answered = form.points.take(order)
        self._is_open = self._answered.is_near.copy()
        self._points = self._answered.readmit(self._is_open)
        self.late = LateCounts(num_near=int(self._is_open.sum()))
        self._figures = Figures(
            **{item.name: getattr(form.figures, item.name)[..., order] for item in fields(Figures)}
        )
        self._keys = deployment_keys(self._points)
        self._ranking = self._rank()
        self._tried: dict[int, bool] = {}
        self._e2e_ms: dict[int, float] = {}

    def name(self, row: int) -> str:
        """Return the name of a point by its row in the closed form's order."""
        return name_of(self._points, row, self._form.answers.engines, self._form.space)

    def next_rows(self) -> list[int]:
        """Return the rows to simulate next, those that would be finalists; none where all are."""
        wanted = self._form.request.num_finalists
        if self.late.num_simulated >= _MAX_LATE_TRIES * wanted:
            self._close()
        left = _MAX_TRIES * wanted - len(self._tried)
        return [row for row in self._leaders(wanted) if row not in self._tried][:left]

    def tell(self, row: int, outcome: LoadOutcome) -> None:
        """Take note of a simulation."""
        self._tried[row] = outcome.probe.is_met
        self._e2e_ms[row] = outcome.report.steady.e2e_latency_ms.mean
        was_open = self._is_open.copy()
        if outcome.probe.is_met:
            self._admit(row, outcome)
        else:
            self._rule_out_missed(row, outcome)
        settled = was_open & ~self._is_open
        num_in = int((settled & self._points.is_ok).sum())
        self.late = LateCounts(
            num_near=self.late.num_near,
            num_simulated=self.late.num_simulated + int(was_open[row]),
            num_ruled_in=self.late.num_ruled_in + num_in,
            num_ruled_out=self.late.num_ruled_out + int(settled.sum()) - num_in,
        )

    def _admit(self, row: int, outcome: LoadOutcome) -> None:
        """Keep a late point that is in time, and with it those of which that is as sure."""
        means = mean_latencies(self._points, self._form.load)["ttft_ms"]
        factors = [
            missed.value / missed.limit
            for missed in outcome.probe.outcomes
            if missed.metric == "ttft_ms" and missed.limit
        ]
        as_sure = (self._keys == self._keys[row]).all(axis=1)
        for factor in factors:
            as_sure &= means * factor <= means[row]
        as_sure &= bool(factors)
        as_sure[row] = True
        self._is_open &= ~as_sure

    def _close(self) -> None:
        """Leave late points that no simulation has judged to the closed form."""
        left = self._is_open & self._points.is_ok
        reasons = [
            f"{reason}, by less than the closed form may be wrong; not simulated"
            for reason in self._answered.reason[left].tolist()
        ]
        self._points = self._points.rule_out(left, "ttft_ms", reasons)
        self._is_open[:] = False
        self._ranking = self._rank()

    def _rule_out_missed(self, row: int, outcome: LoadOutcome) -> None:
        feasibility = outcome.report.feasibility
        if not feasibility.is_feasible:
            self._rule_out(np.arange(len(self._points)) == row, "memory", feasibility.reason)
        for missed in outcome.probe.outcomes:
            if not missed.is_met:
                self._miss(row, missed)
        self._ranking = self._rank()

    def finish(self) -> ClosedForm:
        """Return the closed form in the order it had, with what the simulations left of the ranks.

        The first of the leaders is the first that was simulated and meets the targets; without one
        that does there are none.
        """
        self._close()
        ranking = self._ranking
        rank = np.zeros(len(self._points), dtype=np.int64)
        rank[ranking.order] = ranking.rank
        met = self.sort([row for row, is_met in self._tried.items() if is_met])
        others = [row for row in ranking.leaders.tolist() if self._tried.get(row, True)]
        leaders = [met[0], *(row for row in others if row != met[0])] if met else []
        return replace(
            self._form,
            points=self._points,
            figures=self._figures,
            ranking=Ranking(
                order=np.arange(len(self._points)),
                rank=rank,
                leaders=np.array(leaders, dtype=np.int64),
            ),
        )

    def sort(self, rows: Sequence[int]) -> list[int]:
        """Return rows that were simulated, best first."""
        places = np.argsort(self._ranking.order)
        points, tps_per_gpu = self._points, self._figures.tps_per_gpu
        alike: dict[tuple[float, ...], int] = {}
        group = {}
        for row in sorted(rows, key=places.__getitem__):
            figures = (tps_per_gpu[0, row], points.ttft_us[0, row], points.tpot_us[0, row])
            group[row] = alike.setdefault(figures, row)
        order = {row: (places[group[row]], self._e2e_ms[row], places[row]) for row in group}
        return sorted(group, key=order.__getitem__)

    def _rank(self) -> Ranking:
        return rank_points(self._points, self._figures, self._form.request.objective)

    def _leaders(self, num: int) -> list[int]:
        """Return the best point of each of the best deployments."""
        order = self._ranking.order
        chosen: dict[tuple[int, ...], int] = {}
        for row in order[self._ranking.rank > 0].tolist():
            if len(chosen) == num:
                break
            chosen.setdefault(tuple(self._keys[row].tolist()), row)
        return list(chosen.values())

    def _miss(self, row: int, missed: LimitOutcome) -> None:
        """Rule a point out that misses a target, and with it those of which that is as sure."""
        points = self._points
        others = (self._keys == self._keys[row]).all(axis=1) & points.is_ok
        means = mean_latencies(points, self._form.load).get(missed.metric)
        if means is None:  # attainment: with more requests together fewer are in time
            same_limits = points.step_limit == points.step_limit[row]
            others &= same_limits & (points.batch >= points.batch[row])
        else:
            others &= means * missed.value > missed.limit * means[row]
        others |= np.arange(len(points)) == row
        reason = f"{_describe(missed)} when simulated"
        self._rule_out(others, missed.metric, f"{reason} as {self.name(row)}", (row, reason))

    def _rule_out(
        self, rows: np.ndarray, verdict: str, reason: str, own: tuple[int, str] | None = None
    ) -> None:
        rows = rows & self._points.is_ok
        self._is_open &= ~rows
        reasons = [
            own[1] if own and row == own[0] else reason for row in np.flatnonzero(rows).tolist()
        ]
        if reasons:
            self._points = self._points.rule_out(rows, verdict, reasons)


def _describe(missed: LimitOutcome) -> str:
    if missed.metric == ATTAINMENT:
        return f"{missed.value:.1%} of requests in their SLO, fewer than {missed.limit:.1%},"
    what = describe_limit(missed.metric, missed.percentile)
    value, limit = (format_number(ms, 4) for ms in (missed.value, missed.limit))
    return f"{what} {value} ms is over the limit of {limit} ms"
