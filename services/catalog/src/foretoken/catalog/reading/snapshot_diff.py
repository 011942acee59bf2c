"""What turns one stored snapshot into another."""

from collections.abc import Iterator

import duckdb
import numpy as np
import pyarrow as pa

from foretoken.catalog.array import Integers
from foretoken.catalog.reading.content import hash_rows
from foretoken.catalog.reading.scan import scan_content
from foretoken.catalog.reading.selection import PinnedFilter, VisibleBatches, find_visible_batches
from foretoken.catalog.reading.snapshot_table import find_snapshot
from foretoken.catalog.storage.store import Store
from foretoken.domain.measurements.measurement import SnapshotChange, SnapshotDiff

_PLACE = ("operator", "device", "topology")
# Rows of one snapshot that are compared at a time; what both have is then forgotten.
_SPAN_ROWS = 500_000


def diff_snapshots(store: Store, before: str, after: str) -> SnapshotDiff:
    """Return how many rows of which kind only one of two snapshots has.

    Rows are compared by content and counted as often as they occur; a row that has other flags in
    the other snapshot is one removed and one added.

    Raises:
        UnknownDatasetError, InvalidRequestError: as `find_snapshot`.

    """
    with store.cursor() as cursor, store.cursor() as counting:
        cursor.begin()
        first, second = find_snapshot(cursor, before), find_snapshot(cursor, after)
        counting.execute(
            "CREATE TEMP TABLE surplus (operator VARCHAR, device VARCHAR, topology VARCHAR,"
            " low UBIGINT, high UBIGINT, num_rows BIGINT)"
        )
        for rows in _compare(cursor, first.pinned, second.pinned):
            counting.register("compared", rows)
            counting.execute(
                "INSERT INTO surplus SELECT * REPLACE (sum(num_rows) AS num_rows) FROM compared"
                " GROUP BY ALL HAVING sum(num_rows) <> 0"
            )
        changes = _count_changes(counting)
    return SnapshotDiff(before=first.snapshot, after=second.snapshot, changes=changes)


def _compare(
    cursor: duckdb.DuckDBPyConnection, first: PinnedFilter, second: PinnedFilter
) -> Iterator[pa.Table]:
    """Yield the hashes of rows that may differ: -1 for a row of the first, 1 of the second.

    Rows of a batch come together, so most of what both snapshots have cancels out at once.
    """
    equal = _find_equal_batches(cursor, first, second)
    sides = [
        (change, pinned, find_visible_batches(cursor, pinned).without(equal))
        for change, pinned in ((-1, first), (1, second))
    ]
    for start, stop in _cut_spans([batches for _, _, batches in sides]):
        pieces = [
            piece
            for change, pinned, batches in sides
            for piece in _hash_pieces(cursor, pinned, batches.between(start, stop), change)
        ]
        if pieces:
            yield pa.concat_tables(pieces)


def _find_equal_batches(
    cursor: duckdb.DuckDBPyConnection, first: PinnedFilter, second: PinnedFilter
) -> Integers:
    """Return the numbers of batches of which both select the same rows with the same flags."""
    if first.selection != second.selection:
        return np.empty(0, dtype=np.int64)
    changed = cursor.execute(
        "SELECT DISTINCT batch_number FROM doubt WHERE (since <= $1 AND coalesce(until > $1, true))"
        " <> (since <= $2 AND coalesce(until > $2, true))",
        [first.as_of, second.as_of],
    ).fetchall()
    earlier, later = (find_visible_batches(cursor, pinned).numbers for pinned in (first, second))
    return np.setdiff1d(np.intersect1d(earlier, later), [number for (number,) in changed])


def _cut_spans(sides: list[VisibleBatches]) -> Iterator[tuple[int, int]]:
    """Yield the first and last number of batches that together have about `_SPAN_ROWS` rows."""
    numbers, places = np.unique(
        np.concatenate([batches.numbers for batches in sides]), return_index=True
    )
    num_rows = np.concatenate([batches.table.column("num_rows").to_numpy() for batches in sides])
    spans = np.cumsum(num_rows[places]) // _SPAN_ROWS
    for span in np.unique(spans).tolist():
        inside = numbers[spans == span]
        yield int(inside[0]), int(inside[-1])


def _hash_pieces(
    cursor: duckdb.DuckDBPyConnection, pinned: PinnedFilter, batches: VisibleBatches, change: int
) -> Iterator[pa.Table]:
    for rows in scan_content(cursor, pinned, batches):
        place = {name: rows.column(name) for name in _PLACE}
        low, high = hash_rows(rows)
        changes = np.full(rows.num_rows, change, dtype=np.int64)
        yield pa.table({**place, "low": low, "high": high, "num_rows": changes})


def _count_changes(cursor: duckdb.DuckDBPyConnection) -> tuple[SnapshotChange, ...]:
    query = """
        SELECT operator, device, coalesce(topology, ''),
            sum(greatest(num_rows, 0))::BIGINT, sum(greatest(-num_rows, 0))::BIGINT
        FROM (
            SELECT * REPLACE (sum(num_rows) AS num_rows) FROM surplus
            GROUP BY ALL HAVING sum(num_rows) <> 0
        )
        GROUP BY ALL ORDER BY ALL
    """
    return tuple(
        SnapshotChange(
            operator=operator,
            device=device,
            topology=topology,
            num_added=num_added,
            num_removed=num_removed,
        )
        for operator, device, topology, num_added, num_removed in cursor.execute(query).fetchall()
    )
