"""How well the measured points of a series surround a call."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.features import CONFIGURATION_DIMS, Design, Matrix
from foretoken.predictor.neighbours import Neighbours
from foretoken.predictor.roofline import FloatColumn, IntColumn

# A call further than a factor of two from every measured point, in any dimension, is not
# surrounded by them, unless it is between two values of the sweep that are further apart.
_NEAR_OCTAVES = 1.0
# A sweep's step here is the median of this many on either side; a gap is wider than some of them.
_STEPS_AROUND = 4
_GAP_STEPS = 3.0
# Values that nearly number the points make no grid: leaving one out leaves out a single point.
_MIN_POINTS_PER_VALUE = 4
# A configuration has a range of its own where it has as many values; with points missing at random
# its end is this many of its steps away.
_MIN_RANGE_VALUES = 24
_RANGE_STEPS = 4.0

# Multiplicative hashing by the golden ratio (Knuth, The Art of Computer Programming, 6.4).
_MIXER, _MIXER_SHIFT = np.uint64(0x9E3779B97F4A7C15), 29


class Tier(enum.IntEnum):
    """How far a call is from what was measured; intervals are calibrated for each apart.

    In a gap, the sweep has a wider step at the call than around it, or no point of its value. A
    far configuration is a new one outside the range of those measured; beyond is everything else
    outside, or further inside from all points than the sweep's step.
    """

    GRID = 0
    GAP = 1
    NEW_CONFIGURATION = 2
    BEYOND = 3
    FAR_CONFIGURATION = 4


def is_extrapolated(tiers: IntColumn) -> npt.NDArray[np.bool_]:
    """Tell which tiers the measured points do not surround."""
    return np.asarray(tiers >= Tier.BEYOND)


def sweep_axes(spec: OperatorSpec) -> tuple[int, ...]:
    """Return which of a design's axes a sweep steps through: those no configuration fixes.

    Ratios of sizes follow from the sizes that one sweeps.
    """
    names = spec.axes or spec.dim_names
    return tuple(
        place
        for place, name in enumerate(names)
        if name not in CONFIGURATION_DIMS and not name.endswith("_ratio")
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Measured values of one axis, and which of the spaces between them are gaps."""

    values: FloatColumn
    is_gap: npt.NDArray[np.bool_]
    is_grid: bool

    def in_gap(self, asked: FloatColumn) -> npt.NDArray[np.bool_]:
        """Tell which values lie in a gap."""
        after = np.searchsorted(self.values, asked)
        before = np.minimum(np.maximum(after - 1, 0), len(self.is_gap) - 1)
        is_measured = self.values[np.minimum(after, len(self.values) - 1)] == asked
        return np.asarray(~is_measured & (self.is_grid | self.is_gap[before]))

    def step_around(self, asked: FloatColumn) -> FloatColumn:
        """Return the space between measured values that each value lies in."""
        if len(self.values) == 1:
            return np.zeros(len(asked))
        after = np.searchsorted(self.values, asked)
        after = np.minimum(np.maximum(after, 1), len(self.values) - 1)
        return self.values[after] - self.values[after - 1]


@dataclass(frozen=True, slots=True)
class CoverageMap:
    """What was measured: range of every dimension and axis, values, configurations."""

    points: IntColumn
    low: FloatColumn
    high: FloatColumn
    places: Matrix
    axes: tuple[int, ...]
    axis_values: tuple[_Axis, ...]
    configuration_columns: tuple[int, ...]
    configurations: npt.NDArray[np.uint64]
    configuration_low: Matrix
    configuration_high: Matrix

    def tiers(self, design: Design, neighbours: Neighbours) -> IntColumn:
        """Return the tier of every call."""
        places = design.axes[:, self.axes]
        asked = hash_rows(design.points[:, self.configuration_columns])
        row = np.minimum(np.searchsorted(self.configurations, asked), len(self.configurations) - 1)
        is_known = self.configurations[row] == asked
        is_in_gap = np.zeros(len(asked), dtype=bool)
        for axis, column in zip(self.axis_values, places.T, strict=True):
            is_in_gap |= axis.in_gap(column)
        tiers = np.where(is_in_gap, Tier.GAP, Tier.GRID)
        tiers = np.where(is_known, tiers, Tier.NEW_CONFIGURATION)
        values = _dims_and_axes(design.points, places)
        is_inside = ((values >= self.low) & (values <= self.high)).all(axis=1)
        is_own = (places >= self.configuration_low[row]) & (places <= self.configuration_high[row])
        is_inside &= ~is_known | is_own.all(axis=1)
        is_inside &= self._is_near(design, places, neighbours)
        outside = np.where(is_known, Tier.BEYOND, Tier.FAR_CONFIGURATION)
        return np.where(is_inside, tiers, outside)

    def _is_near(
        self, design: Design, places: Matrix, neighbours: Neighbours
    ) -> npt.NDArray[np.bool_]:
        """Tell whether any neighbour is near on all axes, or no further than the sweep's step."""
        steps = [axis.step_around(c) for axis, c in zip(self.axis_values, places.T, strict=True)]
        reach = np.maximum(np.reshape(steps, places.T.shape).T, _NEAR_OCTAVES)
        is_near = np.zeros(design.num_rows, dtype=bool)
        fixed = self.configuration_columns
        rest = np.arange(design.num_rows)
        for order in range(neighbours.rows.shape[1]):
            nearest = neighbours.rows[rest, order]
            on_axes = np.abs(self.places[nearest] - places[rest]) <= reach[rest]
            asked = design.log_points[rest][:, fixed]
            measured = np.log2(1.0 + self.points[nearest][:, fixed])
            is_like = np.abs(measured - asked) <= _NEAR_OCTAVES
            is_near[rest] = on_axes.all(axis=1) & is_like.all(axis=1)
            rest = rest[~is_near[rest]]
        return is_near


def configuration_columns(spec: OperatorSpec) -> tuple[int, ...]:
    """Return which dimensions, by position, make the configuration."""
    return tuple(i for i, name in enumerate(spec.dim_names) if name in CONFIGURATION_DIMS)


def map_coverage(spec: OperatorSpec, points: IntColumn, along_axes: Matrix) -> CoverageMap:
    """Return the coverage of measured points, given as their design has them."""
    fixed, axes = configuration_columns(spec), sweep_axes(spec)
    places = along_axes[:, axes]
    values = _dims_and_axes(points, places)
    codes = hash_rows(points[:, fixed])
    configurations, inverse = np.unique(codes, return_inverse=True)
    low = np.full((len(configurations), places.shape[1]), -np.inf)
    high = -low
    for axis in range(places.shape[1]):
        low[:, axis], high[:, axis] = _own_ranges(places[:, axis], inverse, len(configurations))
    return CoverageMap(
        points=points,
        low=values.min(axis=0),
        high=values.max(axis=0),
        places=places,
        axes=axes,
        axis_values=tuple(_find_gaps(column) for column in places.T),
        configuration_columns=fixed,
        configurations=configurations,
        configuration_low=low,
        configuration_high=high,
    )


def is_grid_axis(values: FloatColumn) -> bool:
    """Tell whether values recur, so that one of them left out leaves out a line of points."""
    return len(np.unique(values)) <= len(values) / _MIN_POINTS_PER_VALUE


def configuration_codes(spec: OperatorSpec, points: IntColumn) -> npt.NDArray[np.uint64]:
    """Return one number per point, the same for points of one configuration."""
    return hash_rows(points[:, configuration_columns(spec)])


def hash_rows(rows: IntColumn) -> npt.NDArray[np.uint64]:
    """Return one number per row, equal for equal rows, by which rows can be looked up whole."""
    codes = np.zeros(len(rows), dtype=np.uint64)
    for column in rows.T:
        codes = (codes ^ column.astype(np.uint64)) * _MIXER
        codes ^= codes >> np.uint64(_MIXER_SHIFT)
    return codes


def _dims_and_axes(points: IntColumn, places: Matrix) -> Matrix:
    return np.column_stack([np.log2(1.0 + points), places])


def _find_gaps(column: FloatColumn) -> _Axis:
    values = np.unique(column)
    steps = np.diff(values)
    if len(steps) < 2:  # noqa: PLR2004
        return _Axis(values, np.zeros(1, dtype=bool), is_grid_axis(column))
    around = sliding_window_view(
        np.pad(steps, _STEPS_AROUND, constant_values=np.nan), 2 * _STEPS_AROUND + 1
    )
    typical = _row_medians(np.delete(around, _STEPS_AROUND, axis=1))
    return _Axis(values, steps > _GAP_STEPS * typical, is_grid_axis(column))


def _row_medians(steps: Matrix) -> FloatColumn:
    """Return the median of each row's numbers; numpy's own loads masked arrays and takes longer."""
    ordered = np.sort(steps, axis=1)  # what is no number comes last
    counts, rows = np.isfinite(ordered).sum(axis=1), np.arange(len(ordered))
    middle = ordered[rows, (counts - 1) // 2] + ordered[rows, counts // 2]
    return np.asarray(0.5 * middle)


def _own_ranges(
    column: FloatColumn, owner: IntColumn, count: int
) -> tuple[FloatColumn, FloatColumn]:
    """Return the range of each configuration that has one, widened by some of its steps."""
    low, high = np.full(count, -np.inf), np.full(count, np.inf)
    values, starts, ends = _distinct_values(column, owner)
    found = np.flatnonzero(ends - starts >= _MIN_RANGE_VALUES)
    near = np.arange(_STEPS_AROUND + 1)
    first, last = starts[found, None] + near, ends[found, None] - 1 - near[::-1]
    below, above = (_row_medians(np.diff(values[places])) for places in (first, last))
    low[found] = values[first[:, 0]] - _RANGE_STEPS * below
    high[found] = values[last[:, -1]] + _RANGE_STEPS * above
    return low, high


def own_values(column: FloatColumn, owner: IntColumn) -> Iterator[tuple[int, FloatColumn]]:
    """Yield, of the owners with enough of them to have a range of their own, the values."""
    values, starts, ends = _distinct_values(column, owner)
    for index in np.flatnonzero(ends - starts >= _MIN_RANGE_VALUES):
        yield int(index), values[starts[index] : ends[index]]


def _distinct_values(
    column: FloatColumn, owner: IntColumn
) -> tuple[FloatColumn, IntColumn, IntColumn]:
    """Return the values of all owners in order, each once, and where each owner's begin and end."""
    order = np.lexsort((column, owner))
    owners, values = owner[order], column[order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (owners[1:] != owners[:-1]) | (values[1:] != values[:-1])
    ends = np.cumsum(np.bincount(owners[is_new]))
    return values[is_new], np.concatenate([[0], ends[:-1]]), ends
