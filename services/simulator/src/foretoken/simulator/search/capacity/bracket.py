"""The highest of evenly spaced rates that meets the targets, in few runs, and how sure it is.

Rates are the powers of 1 + tolerance, the same for every deployment and every target, so that a
looser target is tried at the same rates.

How far the answer rests on the workload's chance and on the predictor's interval takes no search
for every draw, which would be hundreds of runs: the worst margin as a function of the logarithm of
the rate has much the same shape for all of them. The search has seen it near the answer, and other
requests, or slower steps, move it along the rate. So a run at a rate shows by its margin how far
its own answer is from there; a second one there corrects it.
"""

from collections.abc import Callable, Sequence
from math import ceil, floor, log, log1p, pi, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from foretoken.simulator.grid import Floats
from foretoken.simulator.search.capacity.probe import Probe

# The nominal confidence of the predictor's interval (docs/explanation/estimates.md).
PREDICTOR_CONFIDENCE = 0.9
# A step along the curve is at most this, in logarithms of the rate.
_MAX_STEP = 0.5
_LEAST_SLOPE = 1e-3


class MarginCurve(NamedTuple):
    """The worst margin by the logarithm of the rate: what a search saw, made to ascend.

    It is 0 at `root`.
    """

    log_rate: Floats
    margin: Floats
    root: float

    def distance(self, margin: float) -> float:
        """Return how far above its root the curve has a margin; beyond its ends it goes on."""
        ends = ((0, 1), (-2, -1))
        for (lower, upper), is_outside in zip(
            ends, (margin < self.margin[0], margin > self.margin[-1]), strict=True
        ):
            if is_outside:
                rise = self.margin[upper] - self.margin[lower]
                run = self.log_rate[upper] - self.log_rate[lower]
                end = 0 if lower == 0 else -1
                beyond = (margin - self.margin[end]) * run / rise
                return float(self.log_rate[end] + beyond - self.root)
        return float(np.interp(margin, self.margin, self.log_rate)) - self.root


def fit_curve(probes: Sequence[Probe]) -> MarginCurve:
    """Return the curve of the probes that were run whole, some of which meet the targets."""
    whole = sorted(
        {probe.log_rate: probe.verdict.margin for probe in probes if not probe.is_cut_short}.items()
    )
    log_rate, margin = (np.array(column) for column in zip(*whole, strict=True))
    # Rises by at least a little, so that each margin is at one place.
    margin = np.maximum.accumulate(margin - _LEAST_SLOPE * log_rate) + _LEAST_SLOPE * log_rate
    return MarginCurve(log_rate, margin, float(np.interp(0.0, margin, log_rate)))


def find_crossing(
    margin_at: Callable[[float], float],
    curve: MarginCurve,
    start: float,
    num_runs: int,
    tolerance: float = 0.0,
) -> float:
    """Return about the logarithm of the rate at which another load's margin is 0.

    `margin_at` runs it at a logarithm of a rate. Ends early where a step is below the tolerance.
    """
    below: tuple[float, float] | None = None
    above: tuple[float, float] | None = None
    at = start
    for _ in range(num_runs):
        margin = margin_at(at)
        if margin <= 0:
            below = max(below, (at, margin)) if below else (at, margin)
        else:
            above = min(above, (at, margin)) if above else (at, margin)
        if below and above and above[0] > below[0]:
            share = below[1] / (below[1] - above[1])
            following = below[0] + share * (above[0] - below[0])
        else:
            step = curve.distance(margin)
            following = at - min(max(step, -_MAX_STEP), _MAX_STEP)
        is_close = abs(following - at) < tolerance
        at = following
        if is_close:
            break
    return at


def sampling_width(log_rates: Sequence[float], num_independent: int, confidence: float) -> float:
    """Return half the width of the interval of one draw's answer, in logarithms of the rate.

    The answers of resamples scatter as that one does around the truth: Student's t with a degree of
    freedom for each independent resample but one.
    """
    if len(log_rates) < 2 or num_independent < 2:  # noqa: PLR2004 - a spread needs two
        return 0.0
    spread = float(np.std(log_rates, ddof=1))
    return student_quantile(confidence, num_independent - 1) * spread


def rescale_width(width: float, confidence: float) -> float:
    """Return a width of the predictor's interval at another confidence, errors being normal."""
    normal = NormalDist()
    wanted, nominal = (
        normal.inv_cdf(0.5 + level / 2) for level in (confidence, PREDICTOR_CONFIDENCE)
    )
    return width * wanted / nominal


def student_quantile(confidence: float, num_degrees: int) -> float:
    """Return the t that Student's distribution stays within, on both sides, so often."""
    low, high = 0.0, 1.0
    while _student_share(high, num_degrees) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _student_share(middle, num_degrees) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_share(t: float, num_degrees: int) -> float:
    """Return P(|T| < t), by the sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = float(np.arctan(t / sqrt(num_degrees)))
    sine, cosine = float(np.sin(angle)), float(np.cos(angle))
    is_odd = num_degrees % 2
    total, term = 0.0, cosine if is_odd else 1.0
    for index in range(3 if is_odd else 2, num_degrees + 1, 2):
        total += term
        term *= cosine**2 * (index - 1) / index
    if is_odd:
        return 2 / pi * (angle + sine * total)
    return sine * total


# From the first guess up and down: factors of the rate, until one is met and one is not.
_UPWARD = (1.15, 1.5, 2.5, 6.0, 20.0, 100.0, 1_000.0)
_DOWNWARD = (0.85, 0.6, 0.3, 0.05, 0.001)
# While the bracket is wider than this factor, runs may be cut short.
_WIDE = 1.15

# Called with a rate per second and whether the run may be cut short.
RunAt = Callable[[float, bool], Probe]


class Bracket(NamedTuple):
    """The highest rate seen to meet the targets and the lowest above it that does not; or none."""

    met: Probe | None
    missed: Probe | None


class RateGrid:
    """Powers of 1 + tolerance, by their exponent."""

    def __init__(self, tolerance_ratio: float) -> None:
        self._base = 1 + tolerance_ratio
        self._step = log1p(tolerance_ratio)

    def rate(self, index: int) -> float:
        """Return the rate per second of an exponent."""
        return float(self._base**index)

    def index_below(self, rate_rps: float) -> int:
        """Return the exponent of the highest rate of the grid up to a rate."""
        index = floor(log(rate_rps) / self._step)
        # Logarithms round: the neighbours say which it is.
        while self.rate(index + 1) <= rate_rps:
            index += 1
        while self.rate(index) > rate_rps:
            index -= 1
        return index


def find_bracket(run: RunAt, guess_rps: float, max_rps: float, grid: RateGrid) -> Bracket:
    """Return neighbours on the grid, one that meets the targets and one that does not.

    Starts at the guess. Without `met` not even a thousandth of it does; without `missed` the
    highest rate up to `max_rps` (0: a thousand times the guess) does.
    """
    highest = grid.index_below(max_rps or guess_rps * _UPWARD[-1])
    start = min(grid.index_below(guess_rps), highest)
    first = run(grid.rate(start), True)
    bracket = _Ends(start, first, start, None) if first.verdict.is_met else None
    if bracket is None:
        ends = _go_down(run, grid, start, first)
    else:
        ends = _go_up(run, grid, bracket, highest)
    while ends.met is not None and ends.missed is not None and ends.high - ends.low > 1:
        index = ends.next_index()
        is_wide = grid.rate(ends.high - ends.low) > _WIDE
        ends.take(index, run(grid.rate(index), is_wide))
    return Bracket(ends.met, ends.missed)


class _Ends:
    """The ends of a bracket by their place on the grid; each has its probe, or None."""

    def __init__(self, low: int, met: Probe | None, high: int, missed: Probe | None) -> None:
        self.low, self.met, self.high, self.missed = low, met, high, missed
        self._must_halve = False

    def take(self, index: int, probe: Probe) -> None:
        """Move the end that a probe between them is on the side of."""
        width = self.high - self.low
        if probe.verdict.is_met:
            self.low, self.met = index, probe
        else:
            self.high, self.missed = index, probe
        # Where following the margins did not halve the bracket, the next run does.
        self._must_halve = not self._must_halve and self.high - self.low > width / 2

    def next_index(self) -> int:
        """Return where to look between the ends: where the margins say, or in the middle."""
        middle = (self.low + self.high) // 2
        if self.met is None or self.missed is None or self.missed.is_cut_short or self._must_halve:
            return middle
        below, above = self.met.verdict.margin, self.missed.verdict.margin
        share = below / (below - above) if above > below else 0.5
        index = floor(self.low + share * (self.high - self.low))
        return min(max(index, self.low + 1), self.high - 1)


def _go_up(run: RunAt, grid: RateGrid, ends: _Ends, highest: int) -> _Ends:
    start = ends.low
    for factor in _UPWARD:
        if ends.low == highest:
            break
        step = max(ceil(log(factor) / log(grid.rate(1))), 1)
        index = min(max(start + step, ends.low + 1), highest)
        probe = run(grid.rate(index), True)
        if not probe.verdict.is_met:
            ends.high, ends.missed = index, probe
            break
        ends.low, ends.met = index, probe
    return ends


def _go_down(run: RunAt, grid: RateGrid, start: int, first: Probe) -> _Ends:
    ends = _Ends(start, None, start, first)
    for factor in _DOWNWARD:
        step = max(ceil(-log(factor) / log(grid.rate(1))), 1)
        index = min(start - step, ends.high - 1)
        probe = run(grid.rate(index), True)
        if probe.verdict.is_met:
            ends.low, ends.met = index, probe
            break
        ends.low, ends.high, ends.missed = index, index, probe
    return ends
