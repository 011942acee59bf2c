"""Lines that jump between neighbours although those are almost the same size."""

from collections.abc import Iterator

import numpy as np

from foretoken.catalog.dims import Floats, Indices
from foretoken.catalog.quality.line import combine_codes, rank_values
from foretoken.catalog.quality.stored_row import TABLE, StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

# From the second point before one to the second after it, the dimension grows by at most this.
_STEP_MAX = 1.5
_POINTS_MIN = 30
# Half of the points are off the middle of their neighbours by more than this factor.
_RATIO_MAX = 1.2


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    for places, table in rows.split(TABLE):
        ranks = {name: rank_values(column) for name, column in table.columns.items()}
        for name, rank in ranks.items():
            if rank.max() + 1 < _POINTS_MIN:
                continue
            others = [other for other_name, other in ranks.items() if other_name != name]
            line = combine_codes(others, len(table))
            jumps = _median_jumps(line, table.columns[name], table.level)
            for wild, jump in jumps.items():
                yield FlaggedRows(
                    places[line == wild],
                    f"along {name} half of the points are {jump:.3g} times off the middle of "
                    "their neighbours",
                )


def _median_jumps(line: Indices, column: Indices, level: Floats) -> dict[int, float]:
    """Return the wild lines, and the factor their median point is off its neighbours' middle.

    The middle is that of the next points or of those after them, whichever is closer: kernels
    that like even sizes make saws, not noise.
    """
    order = np.lexsort((column, line))
    line, column, level = line[order], column[order], level[order]
    inner = slice(2, -2)
    is_close = (line[4:] == line[:-4]) & (column[4:] <= _STEP_MAX * column[:-4])
    next_off = level[inner] - (level[3:-1] + level[1:-3]) / 2
    second_off = level[inner] - (level[4:] + level[:-4]) / 2
    off = np.minimum(np.abs(next_off), np.abs(second_off))[is_close]
    of_line = line[inner][is_close]
    if not len(off):
        return {}
    order = np.lexsort((off, of_line))
    lines, starts, counts = np.unique(of_line[order], return_index=True, return_counts=True)
    medians = off[order][starts + counts // 2]
    is_wild = (counts >= _POINTS_MIN) & (medians > np.log(_RATIO_MAX))
    return dict(zip(lines[is_wild].tolist(), np.exp(medians[is_wild]).tolist(), strict=True))


TEST = QualityTest(
    name="erratic",
    summary="on a line whose close neighbours are typically 25 % apart",
    judges=Judges.TABLES,
    find=_find,
)
