"""Where tables meet: points that fall into the same half octave in every dimension.

Over the roofline the times there are alike, so tables can be compared without sharing a point.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.catalog.array import Floats
from foretoken.catalog.dims import Indices
from foretoken.catalog.quality.line import combine_codes
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
    numbers: Indices = np.unique(combine_codes(codes, len(rows)), return_inverse=True)[1]
    return numbers


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
    ranks = [np.unique(column, return_inverse=True)[1] for column in octaves]
    return combine_codes(ranks, len(rows))
