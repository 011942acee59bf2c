"""The highest of evenly spaced rates that meets the targets, in few runs.

Rates are the powers of 1 + tolerance, the same for every deployment and every target, so that a
looser target is tried at the same rates.
"""

from collections.abc import Callable
from math import ceil, floor, log, log1p
from typing import NamedTuple

from foretoken.simulator.search.capacity.probe import Probe

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
