"""Tables most of which no device could reach: what is left of them is no better."""

from collections.abc import Iterator

import numpy as np

from foretoken.catalog.quality.stored_row import TABLE, StoredRows
from foretoken.catalog.quality.test_definition import FlaggedRows, Judges, QualityTest

_PART_MAX = 0.3
_ROWS_MIN = 10


def _find(rows: StoredRows) -> Iterator[FlaggedRows]:
    if not rows.is_impossible.any():
        return
    for places, table in rows.split(TABLE):
        num_impossible = int(np.count_nonzero(table.is_impossible))
        if len(table) >= _ROWS_MIN and num_impossible > _PART_MAX * len(table):
            yield FlaggedRows(
                places[~table.is_impossible],
                f"{num_impossible} of {len(table)} rows of this table are faster than physics",
            )


TEST = QualityTest(
    name="impossible_table",
    summary="in a table of which more than 30 % is faster than the device can be",
    judges=Judges.TABLES,
    find=_find,
)
