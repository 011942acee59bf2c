"""What an estimate is not below: measured points that the call surpasses in every dimension.

More of any size is more work, but not with more heads or experts to share it: only points of the
call's own configuration count. Nor do kernels obey physics to the letter: a longer context may
switch to a faster one. A series is taken to be as monotone as its own measurements are.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.intervals.coverage import configuration_codes
from foretoken.predictor.roofline import FloatColumn, IntColumn

# So large a share of the measured points is not below the floor that the others make.
_OBEYING_RATIO = 0.99
_FEW_CALLS = 16
# Of a configuration with more points some hundred, evenly from the slowest to the fastest, make
# almost the same floor in a fraction of the time.
_MAX_PER_CONFIGURATION = 256


@dataclass(frozen=True, slots=True)
class MonotoneFloor:
    """Measured points by configuration, those of one from the slowest to the fastest.

    `slack_ratio` is how far below the slowest point that it surpasses a call may be, from 0 to 1.
    """

    spec: OperatorSpec
    codes: npt.NDArray[np.uint64]
    points: IntColumn
    latency_us: FloatColumn
    slack_ratio: float

    def floor_us(self, points: IntColumn) -> FloatColumn:
        """Return what the latency of every call is at least; 0 where it surpasses no point."""
        return _surpassed_us(self, points) * self.slack_ratio


def build_floor(
    spec: OperatorSpec, points: IntColumn, latency_us: FloatColumn, slack_ratio: float
) -> MonotoneFloor:
    """Return the floor that measured points make for calls of the same operator.

    A collective has none: a group of other size runs another algorithm.
    """
    if spec.is_collective:
        points, latency_us = points[:0], latency_us[:0]
    codes = configuration_codes(spec, points)
    order = _thin(codes, np.lexsort((-latency_us, codes)))
    return MonotoneFloor(spec, codes[order], points[order], latency_us[order], slack_ratio)


def _thin(codes: npt.NDArray[np.uint64], order: IntColumn) -> IntColumn:
    """Return of ordered rows every so many of each code, its first one always."""
    _, first, counts = np.unique(codes[order], return_index=True, return_counts=True)
    place = np.arange(len(order)) - np.repeat(first, counts)
    step = -(-counts // _MAX_PER_CONFIGURATION)
    return np.asarray(order[place % np.repeat(step, counts) == 0])


def learn_floor(spec: OperatorSpec, points: IntColumn, latency_us: FloatColumn) -> MonotoneFloor:
    """Return the floor with the slack that the measured points themselves need."""
    strict = build_floor(spec, points, latency_us, slack_ratio=1.0)
    if not len(strict.points):
        return strict
    obeyed_ratio = strict.latency_us / _surpassed_us(strict, strict.points)
    slack_ratio = float(np.quantile(obeyed_ratio, 1.0 - _OBEYING_RATIO))
    return replace(strict, slack_ratio=slack_ratio)


def _surpassed_us(floor: MonotoneFloor, asked: IntColumn) -> FloatColumn:
    codes = configuration_codes(floor.spec, asked)
    first = np.searchsorted(floor.codes, codes, side="left")
    last = np.searchsorted(floor.codes, codes, side="right")
    rows = _find(floor.points, np.ascontiguousarray(asked), first, last)
    # One more latency, 0, for row -1.
    return np.asarray(np.append(floor.latency_us, 0.0)[rows])


def _find(points: IntColumn, asked: IntColumn, first: IntColumn, last: IntColumn) -> IntColumn:
    """Return of every call the first row of its range that it surpasses, -1 where there is none."""
    if len(asked) > _FEW_CALLS:
        from foretoken.predictor.regression.monotone_loop import find_surpassed

        return find_surpassed(points, asked, first, last)
    # Importing the compiler takes longer than a few calls do without it.
    found = np.full(len(asked), -1)
    for call, (start, stop) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        surpassed = np.flatnonzero((points[start:stop] <= asked[call]).all(axis=1))
        if len(surpassed):
            found[call] = start + surpassed[0]
    return found
