"""The same point measured several times, apart by more than the noise of measuring."""

from collections.abc import Iterator

import numpy as np

from foretoken.catalog.dims import Mask
from foretoken.catalog.quality.line import bin_points, merge_duplicates
from foretoken.catalog.quality.stored_row import ALIKE, RESOLUTION_US, StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

_RATIO_MAX = 0.1
# So many repeats have a spread of their own, and one of them is off beyond so many deviations.
_REPEATS_MIN = 4
_DEVIATIONS_MAX = 3.0
# So many rows around a point tell which of its few repeats is right.
_CELL_ROWS_MIN = 8
# A normal distribution's standard deviation over its median absolute deviation.
_SIGMAS_PER_MAD = 1.4826


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    for places, alike in rows.split(ALIKE):
        times_us = alike.latency_us
        points = merge_duplicates(alike.columns, times_us)
        if len(points.rows) == len(times_us):
            continue
        of_point = points.of_rows(points.latency_us)
        off_us = np.abs(times_us - of_point)
        spread_us = _SIGMAS_PER_MAD * merge_duplicates(alike.columns, off_us).latency_us
        has_spread = points.num_repeats >= _REPEATS_MIN
        allowed_us = points.of_rows(np.where(has_spread, _DEVIATIONS_MAX * spread_us, 0.0))
        allowed_us = np.maximum(np.maximum(allowed_us, _RATIO_MAX * of_point), RESOLUTION_US)
        is_few = points.num_repeats[points.point_of_row] < _REPEATS_MIN
        found = np.flatnonzero((off_us > allowed_us) & ~(is_few & _agrees_with_cell(alike)))
        if len(found):
            yield FlaggedRows(
                places[found],
                [
                    f"{times_us[place]:.4g} us where this point's median is "
                    f"{of_point[place]:.4g} us"
                    for place in found
                ],
            )


def _agrees_with_cell(rows: StoredRows) -> Mask:
    """Return which rows are at the level of the points around them: of two, those are right."""
    cell = bin_points(rows)
    level = rows.level
    order = np.lexsort((level, cell))
    _, starts, inverse, counts = np.unique(
        cell[order], return_index=True, return_inverse=True, return_counts=True
    )
    middle = level[order][starts + counts // 2]
    agrees = np.empty(len(level), dtype=bool)
    agrees[order] = (np.abs(level[order] - middle[inverse]) < np.log1p(_RATIO_MAX)) & (
        counts[inverse] >= _CELL_ROWS_MIN
    )
    return agrees


TEST = QualityTest(
    name="duplicate_disagrees",
    summary="more than 10 % off the median of the same point, and beyond the spread of its repeats",
    judges=Judges.ROWS,
    find=_find,
)
