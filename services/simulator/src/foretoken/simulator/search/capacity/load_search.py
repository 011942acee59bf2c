"""The search for a load's highest rate: its bracket, and the interval around it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, hypot, log
from typing import NamedTuple

from foretoken.domain.requests.search import CapacityProbe
from foretoken.simulator.search.capacity.bracket import Bracket, RateGrid, find_bracket
from foretoken.simulator.search.capacity.confidence import (
    MarginCurve,
    fit_curve,
    rescale_width,
    sampling_width,
)
from foretoken.simulator.search.capacity.other_load import (
    Basis,
    OtherLoad,
    find_highest_rate,
)
from foretoken.simulator.search.capacity.predictor_bound import BOUNDS, Bound
from foretoken.simulator.search.capacity.probe import Load, Probe, run_probe
from foretoken.simulator.search.capacity.resample import Resamples
from foretoken.simulator.search.context import SearchContext
from foretoken.simulator.search.executors.inline import InlineExecutor
from foretoken.simulator.serving.record import ServingRecord

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
