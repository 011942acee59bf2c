"""Points of an operator's space, the cells where tables meet, and lines of smooth latency.

Over the roofline the times there are alike, so tables can be compared without sharing a point.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from foretoken.catalog.dims import Columns, Floats, Indices, Mask
from foretoken.catalog.quality.stored_row import StoredRows

_BINS_PER_OCTAVE = 2
# Tables that meet in fewer bins say too little about each other.
BINS_MIN = 8


@dataclass(frozen=True, slots=True)
class Cells:
    """The median levels of tables in their bins, by bin and from the fastest on."""

    bins: Indices
    tables: Indices
    levels: Floats

    def ratios_of(self, table: int, others: Sequence[int]) -> Iterator[Floats]:
        """Yield a table's medians over those of the fastest of others, for each that is fastest."""
        here = np.flatnonzero(self.tables == table)
        there = np.flatnonzero(np.isin(self.tables, others))
        bins, first = np.unique(self.bins[there], return_index=True)
        _, in_here, in_there = np.intersect1d(self.bins[here], bins, return_indices=True)
        fastest = there[first[in_there]]
        ratios = np.exp(self.levels[here[in_here]] - self.levels[fastest])
        for other in np.unique(self.tables[fastest]):
            yield ratios[self.tables[fastest] == other]


def number_rows(rows: StoredRows, names: Sequence[str]) -> Indices:
    """Return a number per row, from 0 on, for what it says in some text columns."""
    codes = [rows.coded[name].codes.astype(np.int64) for name in names]
    return rank_values(combine_codes(codes, len(rows)))


def fill_cells(rows: StoredRows, tables: Indices) -> Cells:
    """Return the cells of rows whose tables are numbered."""
    bins, level = bin_points(rows), rows.level
    order = np.lexsort((level, tables, bins))
    is_start = np.ones(len(order), dtype=bool)
    is_start[1:] = (np.diff(bins[order]) != 0) | (np.diff(tables[order]) != 0)
    starts = np.flatnonzero(is_start)
    middles = order[starts + np.diff(np.append(starts, len(order))) // 2]
    middles = middles[np.lexsort((level[middles], bins[middles]))]
    return Cells(bins[middles], tables[middles], level[middles])


def bin_points(rows: StoredRows) -> Indices:
    """Return a number per row for the half octaves its dimensions fall into."""
    octaves = [
        np.round(np.log2(np.maximum(column, 0.5)) * _BINS_PER_OCTAVE)
        for column in rows.columns.values()
    ]
    return combine_codes([rank_values(column) for column in octaves], len(rows))


Value = TypeVar("Value", bound=np.generic)

# Dimensions that may grow together along a line: a longer prompt has more queries, more context
# and more of their pairs.
_MOVING_MAX = 3
# Neighbours looked at on either side, and how many are needed there; where a line ends on one
# side, the other needs all of them.
_SIDE = 3
_SIDE_MIN = 2
_LINE_MIN = _SIDE + 1
# What lies beyond the end of a line is a guess, so a point there must be this much further off.
_END_MARGIN = 3.0
# With fewer open points than this part, it pays to look for the lines they are on.
_FEW_RATIO = 0.3


@dataclass(frozen=True, slots=True)
class Points:
    """The distinct points of rows: a row for each, the median latency, and every row's point."""

    rows: Indices
    latency_us: Floats
    num_repeats: Indices
    point_of_row: Indices

    def columns_of(self, columns: Columns) -> Columns:
        """Return the dimensions of the points."""
        return {name: column[self.rows] for name, column in columns.items()}

    def of_rows(self, values: npt.NDArray[Value]) -> npt.NDArray[Value]:
        """Return for every row the value of its point."""
        of_rows: npt.NDArray[Value] = values[self.point_of_row]
        return of_rows


def merge_duplicates(columns: Columns, latency_us: Floats) -> Points:
    """Return the distinct points of rows, which need not be sorted."""
    ranks = [rank_values(column) for column in columns.values()]
    point = combine_codes(ranks, len(latency_us))
    order = np.lexsort((latency_us, point))
    ordered = point[order]
    is_start = np.ones(len(order), dtype=bool)
    is_start[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(is_start)
    counts = np.diff(np.append(starts, len(order)))
    ranked = latency_us[order]
    medians = (ranked[starts + (counts - 1) // 2] + ranked[starts + counts // 2]) / 2
    point_of_row = np.empty(len(order), dtype=np.int64)
    point_of_row[order] = np.repeat(np.arange(len(starts)), counts)
    return Points(order[starts], medians, counts, point_of_row)


def deviations_from_lines(
    columns: Columns, latency_us: Floats, expected_us: Floats, *, limit: float = 1.0
) -> Floats:
    """Return each point's latency over that of its neighbours, 1 where it has too few.

    A line holds points that differ in one dimension, or in a few that grow together. Along it,
    neighbours are compared by latency over `expected_us`, which takes out most of the trend. A
    point is off its line as far as it is off the nearer of its two sides, the median of each and
    the next point on each: two neighbours that agree are a regime of the kernel, not a slip. It
    is off altogether as far as it is off the line it fits best. Beyond the end of a line the
    deviation counts `_END_MARGIN` times less. A point that is off by less than the factor `limit`
    along one line is not looked at along others.
    """
    lattice = _Lattice(columns)
    level = (np.log(latency_us) - np.log(expected_us))[lattice.order]
    nearest = np.full(len(level), np.inf)
    for num_moving in range(1, _MOVING_MAX + 1):
        for moving in itertools.combinations(range(len(lattice.ranks)), num_moving):
            is_open = np.abs(nearest) > np.log(limit)
            places, line = _find_lines(lattice, moving, is_open)
            if len(places):
                deviation = _deviations_along(level[places], line)
                better = np.abs(deviation) < np.abs(nearest[places])  # never for NaN
                nearest[places[better]] = deviation[better]
    nearest[np.isinf(nearest)] = 0.0
    ratios = np.empty(len(level))
    ratios[lattice.order] = np.exp(nearest)
    return ratios


# Codes of points are below this.
_MAX_CODE = 2**63


class _Lattice:
    """Points in the order of their dimensions, the last one fastest.

    `order` are the places of the points, `ranks` their places among the values of every dimension
    that varies.
    """

    def __init__(self, columns: Columns) -> None:
        ranks = [rank_values(column) for column in columns.values()]
        ranks = [rank for rank in ranks if rank.any()]
        code = combine_codes(ranks, len(next(iter(columns.values()))))
        self.order = np.argsort(code, kind="stable")
        self.ranks = [rank[self.order].astype(np.uint64) for rank in ranks]
        sizes = [int(rank.max()) + 1 for rank in ranks]
        weights = [math.prod(sizes[number + 1 :]) for number in range(len(sizes))]
        if math.prod(sizes) > _MAX_CODE:
            weights = np.random.default_rng(0).integers(1, _MAX_CODE, len(sizes)).tolist()
        self._terms = [
            rank * np.uint64(weight) for rank, weight in zip(self.ranks, weights, strict=True)
        ]
        self._sum = sum(self._terms, np.zeros(len(code), dtype=np.uint64))

    def group(self, moving: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Return a number for every point, the same for those that differ in some dimensions.

        Sums of ranks times weights, modulo 2**64. Where that is too little for all ranks to be its
        digits, weights are random: of a million groups two share a number with odds of 1 to 10**7.
        """
        group: npt.NDArray[np.uint64] = self._sum
        for number in moving:
            group = group - self._terms[number]
        return group


def _find_lines(lattice: _Lattice, moving: Sequence[int], is_open: Mask) -> tuple[Indices, Indices]:
    """Return the points on lines long enough that hold an open one, and each one's line.

    A line is the points equal in all dimensions but the moving ones, where all of these grow from
    each to the next; it comes in that order.
    """
    if not is_open.any():
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    places, group = np.arange(len(is_open)), lattice.group(moving)
    if is_open.mean() < _FEW_RATIO:
        of_open = pc.is_in(pa.array(group), value_set=pa.array(group[is_open]))
        places = np.flatnonzero(of_open.to_numpy(zero_copy_only=False))
        group = group[places]
    # Points of a group are in the order of the first moving dimension.
    order = np.argsort(group, kind="stable")
    places, group = places[order], group[order]
    is_start = np.ones(len(order), dtype=bool)
    is_start[1:] = group[1:] != group[:-1]
    line = np.cumsum(is_start) - 1
    grows = np.ones(len(order), dtype=bool)
    for number in moving:
        rank = lattice.ranks[number][places]
        grows[1:] &= rank[1:] > rank[:-1]
    starts = np.flatnonzero(is_start)
    is_line = np.logical_and.reduceat(grows | is_start, starts)
    is_line &= np.diff(np.append(starts, len(order))) >= _LINE_MIN
    kept = is_line[line]
    return places[kept], line[kept]


def combine_codes(columns: Sequence[Indices], num_rows: int) -> Indices:
    """Return one code per row that orders and tells apart rows like all columns together."""
    code = np.zeros(num_rows, dtype=np.int64)
    for column in columns:
        size = int(column.max()) + 1
        if (int(code.max()) + 1) * size >= np.iinfo(np.int64).max:
            code = rank_values(code)
        code = code * size + column
    return code


def rank_values(column: npt.NDArray[Value]) -> Indices:
    """Return for every row, from 0 on, the place of its value among the distinct ones."""
    coded = pa.array(column).dictionary_encode()
    values = coded.dictionary.to_numpy()
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values)] = np.arange(len(values))
    of_rows: Indices = ranks[coded.indices.to_numpy()]
    return of_rows


def _deviations_along(level: Floats, line: Indices) -> Floats:
    """Return how far (as a logarithm) each point is off its line; NaN with too few neighbours.

    A point above one side and below the other is on a slope: it does not deviate.
    """
    left, right = _neighbours(level, line, -1), _neighbours(level, line, 1)
    num_left, num_right = np.isfinite(left).sum(axis=0), np.isfinite(right).sum(axis=0)
    has_both = (num_left >= _SIDE_MIN) & (num_right >= _SIDE_MIN)
    inner = _gentlest(level - _medians(left), level - _medians(right), level - left[0])
    deviation = np.where(has_both, _gentlest(inner, level - right[0]), np.nan)
    for side, number in ((left, num_left), (right, num_right)):
        trend = 2 * side[0] - side[1]
        end = _gentlest(level - _medians(side), level - trend, level - side[0]) / _END_MARGIN
        deviation = np.where(~has_both & (number == _SIDE), end, deviation)
    return deviation


def _neighbours(level: Floats, line: Indices, direction: int) -> Floats:
    """Return the next points on one side, nearest first; NaN beyond the line's end."""
    found = np.full((_SIDE, len(level)), np.nan)
    for distance in range(1, _SIDE + 1):
        same = line[distance:] == line[:-distance]
        if direction > 0:
            found[distance - 1, :-distance] = np.where(same, level[distance:], np.nan)
        else:
            found[distance - 1, distance:] = np.where(same, level[:-distance], np.nan)
    return found


def _medians(neighbours: Floats) -> Floats:
    """Return the median of the finite ones of three; NaN for fewer than two."""
    ranked = np.sort(neighbours, axis=0)  # NaN last
    medians: Floats = np.where(np.isfinite(ranked[2]), ranked[1], (ranked[0] + ranked[1]) / 2)
    return medians


def _gentlest(*deviations: Floats) -> Floats:
    """Return the smallest of deviations that all point the same way, else 0."""
    stacked = np.stack(deviations)
    smallest = np.take_along_axis(stacked, np.abs(stacked).argmin(axis=0)[None], axis=0)[0]
    agrees = (stacked > 0).all(axis=0) | (stacked < 0).all(axis=0)
    return np.where(agrees, smallest, 0.0)
