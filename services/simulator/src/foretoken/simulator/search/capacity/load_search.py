"""The search for a load's highest rate: its bracket, the interval around it, and what qualifies it.

The highest rates of other requests, or with step times at the predictor's bounds, near one that is
known, are found of plain data, so that the workers of a search find many of them at the same time.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, floor, hypot, inf, log, log10
from typing import Any, Literal, NamedTuple

import numpy as np

from foretoken.domain.requests.search import CapacityProbe
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.simulator.cost.surface import LatencySurfaces, Surface
from foretoken.simulator.search.capacity.bracket import (
    Bracket,
    MarginCurve,
    RateGrid,
    find_bracket,
    find_crossing,
    fit_curve,
    rescale_width,
    sampling_width,
)
from foretoken.simulator.search.capacity.probe import Load, Probe, Resamples, run_probe
from foretoken.simulator.search.context import SearchContext
from foretoken.simulator.serving.metrics import is_completed
from foretoken.simulator.serving.record import RequestRecord, ServingRecord
from foretoken.simulator.serving.simulation import FetchSurfaces
from foretoken.simulator.workload.request_plan import RequestPlan

Bound = Literal["low", "high"]
BOUNDS: tuple[Bound, ...] = ("low", "high")
_SURFACES = ("tokens", "rows", "decode", "mixed", "prefill", "prefill_more", "group")


def fetch_at_bound(fetch: FetchSurfaces, bound: Bound) -> FetchSurfaces:
    """Return what fetches surfaces on which every operator takes a bound of its interval."""
    return lambda spec: take_bound(fetch(spec), bound)


def take_bound(surfaces: LatencySurfaces, bound: Bound) -> LatencySurfaces:
    """Return surfaces whose every point is at a bound of its interval, its parts in proportion."""
    num_groups = len(surfaces.groups)
    moved: dict[str, Any] = {
        name: _move(surface, num_groups, num_groups + BOUNDS.index(bound))
        for name in _SURFACES
        if (surface := getattr(surfaces, name)) is not None
    }
    if surfaces.apart is not None:
        sent = _move(surfaces.apart.sent, num_groups, num_groups + BOUNDS.index(bound))
        moved["apart"] = replace(surfaces.apart, sent=sent)
    return replace(surfaces, **moved)


def _move(surface: Surface, num_groups: int, channel: int) -> Surface:
    values = surface.values.copy()
    total = values[:, :num_groups].sum(axis=1)
    ratio = np.divide(values[:, channel], total, out=np.ones_like(total), where=total > 0)
    values[:, :num_groups] *= ratio[:, None]
    return replace(surface, values=values)


# A rate so much lower that requests hardly meet.
_IDLE_RATIO = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherLoad:
    """What differs from the load of a search, and how many runs its own highest rate may take.

    `name` is that of the basis' load whose steps it has. Without a `plan` the requests are that
    load's; with one they are others, which arrive `plan_rps` times per second.
    """

    name: str
    num_runs: int
    plan: RequestPlan | None = None
    plan_rps: float = 0.0
    tolerance: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """What other loads share: loads by name, and the curve of the search."""

    loads: Mapping[str, Load]
    curve: MarginCurve


def find_highest_rate(other: OtherLoad, basis: Basis) -> float:
    """Return the logarithm of the highest rate (1/s) at which another load meets the targets.

    Found by few runs; minus infinity where no rate meets them. That is looked at only where the
    steps differ: other requests of the kind hardly meet at a low rate, as the search's own.
    """
    load = basis.loads[other.name]
    if other.plan is not None:
        load = replace(load, plan=other.plan, plan_rps=other.plan_rps)
    margins: list[float] = []

    def margin_at(log_rate: float) -> float:
        margins.append(run_probe(load, exp(log_rate), lambda _: None)[0].verdict.margin)
        return margins[-1]

    root = basis.curve.root
    found = find_crossing(margin_at, basis.curve, root, other.num_runs, other.tolerance)
    if other.plan is None and min(margins) > 0 and margin_at(root + log(_IDLE_RATIO)) > 0:
        return -inf
    return found


# Where on the bar a bracket begins and ends, and other loads end.
_BEGUN_AT, _BRACKETED_AT, _DRAWN_AT = 0.05, 0.5, 0.95
# Runs that a bracket takes, more or less.
_USUAL_RUNS = 10
# Runs for the answer of a draw, and of a bound, which lies further away.
_DRAW_RUNS, _BOUND_RUNS = 2, 4
# CPU time of a worker before its first task, mostly to load compiled code.
_WORKERS_START_S = 3.0
# The load itself among those with other steps.
_OWN = ""


class AnswerInterval(NamedTuple):
    """Bounds of the highest rate per second, of all causes and of the requests' chance alone."""

    low_rps: float
    high_rps: float
    sampling_low_rps: float
    sampling_high_rps: float


class LoadSearch:
    """Finds the highest rate of a load; keeps its probes and the run at that rate."""

    def __init__(
        self, load: Load, tolerance_ratio: float, confidence_ratio: float, context: SearchContext
    ) -> None:
        """Take what is searched, how close to come and how sure its interval shall be."""
        self._load, self._context = load, context
        self._tolerance, self._confidence = tolerance_ratio, confidence_ratio
        self.probes: list[Probe] = []
        self.record: ServingRecord | None = None
        self._whole_run_s = 0.0

    @property
    def figures(self) -> tuple[CapacityProbe, ...]:
        """The probes of the load itself, as reports have them."""
        return tuple(probe.figures for probe in self.probes)

    def find_bracket(self, guess_rps: float, max_rps: float = 0.0) -> Bracket:
        """Return neighbouring rates, one that meets the targets and one that does not.

        `record` is the run at the first of them.
        """
        best_rps = 0.0

        def run(rate_rps: float, may_cut: bool) -> Probe:
            nonlocal best_rps
            part = 1 - (1 - 1 / _USUAL_RUNS) ** (len(self.probes) + 1)
            at = _BEGUN_AT + (_BRACKETED_AT - _BEGUN_AT) * part
            probe, record = self._run(self._load, rate_rps, at, "try", may_cut=may_cut)
            self.probes.append(probe)
            if probe.verdict.is_met and rate_rps > best_rps:
                best_rps, self.record = rate_rps, record
            return probe

        return find_bracket(run, guess_rps, max_rps, RateGrid(self._tolerance))

    def find_interval(
        self, met: Probe, missed: Probe, resamples: Resamples, bounds: Mapping[Bound, Load]
    ) -> AnswerInterval:
        """Return the interval of the answer between a bracket's ends.

        `bounds` are the load with steps as fast and as slow as the predictor's interval has them,
        absent where it is a point. Their highest rates and those of resamples are tasks of the
        context, but where they take no longer than its workers to start.
        """
        curve = self._curve(missed)
        others = [
            OtherLoad(name=_OWN, num_runs=_DRAW_RUNS, plan=load.plan, plan_rps=load.plan_rps)
            for load in resamples.loads
        ]
        others += [
            OtherLoad(name=bound, num_runs=_BOUND_RUNS, tolerance=self._tolerance)
            for bound in bounds
        ]
        loads = {_OWN: self._load} | {str(bound): load for bound, load in bounds.items()}
        basis = Basis(loads=loads, curve=curve)
        found = self._find_highest_rates(others, basis)
        num_draws = len(resamples.loads)
        width = sampling_width(found[:num_draws], resamples.num_independent, self._confidence)
        shifts = {
            bound: rescale_width(log_rate - curve.root, self._confidence)
            for bound, log_rate in zip(bounds, found[num_draws:], strict=True)
        }
        faster, slower = (shifts.get(bound, 0.0) for bound in BOUNDS)
        center = curve.root
        # The answer is known no better than its bracket.
        floor, ceiling = log(met.rate_rps), log(missed.rate_rps)
        return AnswerInterval(
            low_rps=exp(min(center - hypot(width, max(-slower, 0.0)), floor)),
            high_rps=exp(max(center + hypot(width, max(faster, 0.0)), ceiling)),
            sampling_low_rps=exp(min(center - width, floor)),
            sampling_high_rps=exp(max(center + width, ceiling)),
        )

    def _curve(self, missed: Probe) -> MarginCurve:
        if missed.is_cut_short:
            probe, _ = self._run(self._load, missed.rate_rps, _BRACKETED_AT, "run whole")
            self.probes[self.probes.index(missed)] = probe
        return fit_curve(self.probes)

    def _find_highest_rates(self, others: Sequence[OtherLoad], basis: Basis) -> list[float]:
        """Return the logarithm of each load's highest rate, in order."""
        message = f"the same of {len(others)} others: {{}} done"
        self._context.update(_BRACKETED_AT, message.format(0))
        found: dict[int, float] = {}
        for index, log_rate in self._start(others, basis):
            found[index] = log_rate
            part = len(found) / len(others)
            at = _BRACKETED_AT + (_DRAWN_AT - _BRACKETED_AT) * part
            self._context.update(at, message.format(len(found)))
        return [found[index] for index in range(len(others))]

    def _start(self, others: Sequence[OtherLoad], basis: Basis) -> Iterator[tuple[int, float]]:
        if self._whole_run_s * sum(other.num_runs for other in others) > _WORKERS_START_S:
            return self._context.run(find_highest_rate, others, basis)
        return InlineExecutor().run(find_highest_rate, others, basis)

    def _run(
        self, load: Load, rate_rps: float, at: float, what: str, *, may_cut: bool = False
    ) -> tuple[Probe, ServingRecord]:
        message = f"{what}: {rate_rps:.4g} requests/s"
        self._context.update(at, message)
        advance: Callable[[float], None] = lambda _: self._context.update(at, message)  # noqa: E731
        started_s = time.thread_time()
        probe, record = run_probe(load, rate_rps, advance, may_cut=may_cut)
        if not probe.is_cut_short:
            self._whole_run_s = time.thread_time() - started_s
        return probe, record


def list_notes(
    requests: RequestRecord,
    capacity_rps: float,
    interval: AnswerInterval | None,
    tolerance_ratio: float,
    resamples: Resamples | None,
) -> tuple[str, ...]:
    """Return what to know of an answer; `requests` are those of the run at that rate.

    `interval` and `resamples` are None where no rate was seen to miss the targets.
    """
    low_rps = interval.sampling_low_rps if interval else capacity_rps
    width = max(1 - low_rps / capacity_rps, tolerance_ratio)
    notes = [_say_short(requests, capacity_rps, width)]
    if resamples is not None and not resamples.loads:
        notes.append(
            "the trace is too short to be cut into blocks, so the interval does not tell how far"
            " the answer rests on these very requests: give a longer trace"
        )
    return tuple(note for note in notes if note)


def unfinished_share(requests: RequestRecord) -> float:
    """Return the share of completed requests that were not complete when the last one arrived.

    What a deployment completed until then is all that the run shows it can keep up with: after it
    nothing comes that would have to wait. So the rate it bears for longer is at least the rate of
    the run less this share, and a queue that grows more slowly than that does not show.
    """
    done = is_completed(requests)
    finished_ns = np.asarray(requests.finished_ns)[done]
    last_ns = np.asarray(requests.arrival_ns).max()
    return float((finished_ns > last_ns).mean()) if len(finished_ns) else 1.0


def _say_short(requests: RequestRecord, capacity_rps: float, width: float) -> str:
    """Return that the requests are too few for the width of the interval, if they are."""
    share = unfinished_share(requests)
    if share <= width:
        return ""
    num_requests = len(requests.arrival_ns)
    # The share falls with the number of requests, the width with its root.
    enough = num_requests * (share / width) ** 2
    return (
        f"the workload is short: {share:.0%} of its {num_requests:,} requests were not finished"
        f" when the last one arrived, so a queue that grows may not show, and sure are only"
        f" {capacity_rps * (1 - share):.4g} requests/s; give it about {_round_up(enough):,}"
        " requests"
    )


def _round_up(number: float) -> int:
    """Return the next number of two digits and zeros."""
    unit = int(10 ** max(floor(log10(number)) - 1, 0))
    return ceil(number / unit) * unit
