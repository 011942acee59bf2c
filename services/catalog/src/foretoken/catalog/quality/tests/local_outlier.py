"""Points off the line through their neighbours."""

from collections.abc import Iterator

import numpy as np

from foretoken.catalog.quality.line import deviations_from_lines, merge_duplicates
from foretoken.catalog.quality.stored_row import ALIKE, RESOLUTION_US, StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

# Off the neighbours by more than this factor, either way.
_RATIO_MAX = 1.5


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    for places, alike in rows.split(ALIKE):
        points = merge_duplicates(alike.columns, alike.latency_us)
        expected_us = alike.expected_us[points.rows]
        ratios = deviations_from_lines(
            points.columns_of(alike.columns), points.latency_us, expected_us, limit=_RATIO_MAX
        )
        is_off = np.maximum(ratios, 1 / ratios) > _RATIO_MAX
        is_off &= np.abs(points.latency_us * (1 - 1 / ratios)) > RESOLUTION_US
        found = np.flatnonzero(points.of_rows(is_off))
        if len(found):
            of_row = points.of_rows(ratios)[found]
            yield FlaggedRows(
                places[found],
                [f"{ratio:.3g} times what its neighbours suggest" for ratio in of_row],
            )


TEST = QualityTest(
    name="local_outlier",
    summary="more than 1.5 times off its neighbours along every dimension",
    judges=Judges.ROWS,
    find=_find,
)
