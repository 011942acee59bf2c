"""Snapshots: what a filter selected at a moment, named by its content and never changed.

A stored snapshot is the filter and the moment. Its rows are selected anew whenever they are read:
rows never change, and prune leaves those that a snapshot needs.
"""

from dataclasses import dataclass
from datetime import datetime

import duckdb
import numpy as np

from foretoken.catalog.array import Integers
from foretoken.catalog.reading.content import ContentHash
from foretoken.catalog.reading.scan import scan_content
from foretoken.catalog.reading.selection import (
    PinnedFilter,
    VisibleBatches,
    find_row_condition,
    find_visible_batches,
    narrow_filter,
)
from foretoken.catalog.reading.snapshot_table import (
    SHORT_NAME_CHARS,
    fetch_by_content,
    fetch_snapshots,
    find_snapshot,
    insert_holder,
    insert_snapshot,
)
from foretoken.catalog.storage.store import Store, next_moment
from foretoken.domain.errors import SnapshotInUseError
from foretoken.domain.measurements.measurement import MeasurementFilter, Snapshot


def pin_filter(cursor: duckdb.DuckDBPyConnection, selection: MeasurementFilter) -> PinnedFilter:
    """Return the filter at the present moment, or within the snapshot it names at that one's.

    Raises:
        UnknownDatasetError: there is no such snapshot.
        InvalidRequestError: several have names that begin so, or it holds nothing of the kind.

    """
    if not selection.snapshot:
        return PinnedFilter(selection, next_moment(cursor) - 1)
    pinned = find_snapshot(cursor, selection.snapshot).pinned
    return PinnedFilter(narrow_filter(pinned.selection, selection), pinned.as_of)


def describe_snapshot(store: Store, selection: MeasurementFilter) -> Snapshot:
    """Return the hash of the selected rows' content, and what is stored under it.

    Neither the order of rows nor the run, time or file they came by matters.

    Raises:
        UnknownDatasetError, InvalidRequestError: as `pin_filter`.

    """
    with store.cursor() as cursor:
        cursor.begin()
        taken = _take(cursor, pin_filter(cursor, selection))
        stored = fetch_by_content(cursor, taken.content_hash)
    return taken.describe() if stored is None else stored.snapshot


def create_snapshot(
    store: Store, selection: MeasurementFilter, holder: str, now: datetime
) -> Snapshot:
    """Store what the filter selects now, held by `holder` unless that is empty.

    The same content is the same snapshot: it gets one more holder.

    Raises:
        UnknownDatasetError, InvalidRequestError: as `pin_filter`.

    """
    while True:
        with store.cursor() as cursor:
            cursor.begin()
            taken = _take(cursor, pin_filter(cursor, selection))
        with store.transaction() as cursor:
            stored = fetch_by_content(cursor, taken.content_hash)
            if stored is None and not taken.is_still_there(cursor):
                continue  # rows were pruned after they were read: look again
            if stored is None:
                insert_snapshot(cursor, taken.describe(), taken.pinned, now)
            if holder:
                insert_holder(cursor, taken.content_hash, holder, now)
            return find_snapshot(cursor, taken.content_hash).snapshot


def list_snapshots(store: Store) -> tuple[Snapshot, ...]:
    """Return the stored snapshots, newest first."""
    with store.cursor() as cursor:
        return tuple(entry.snapshot for entry in fetch_snapshots(cursor))


def release_snapshot(store: Store, name: str, holder: str) -> Snapshot:
    """Take a holder from a snapshot; harmless when it does not hold it.

    Raises:
        UnknownDatasetError, InvalidRequestError: as `find_snapshot`.

    """
    with store.transaction() as cursor:
        content_hash = find_snapshot(cursor, name).snapshot.content_hash
        cursor.execute(
            "DELETE FROM snapshot_holder WHERE content_hash = ? AND holder = ?",
            [content_hash, holder],
        )
        return find_snapshot(cursor, content_hash).snapshot


def delete_snapshot(store: Store, name: str) -> None:
    """Forget a snapshot that nothing holds; its rows stay.

    Raises:
        SnapshotInUseError: something holds it; says what.
        UnknownDatasetError, InvalidRequestError: as `find_snapshot`.

    """
    with store.transaction() as cursor:
        snapshot = find_snapshot(cursor, name).snapshot
        if snapshot.holders:
            raise SnapshotInUseError(
                f"snapshot {snapshot.content_hash[:SHORT_NAME_CHARS]} is held by "
                f"{', '.join(snapshot.holders)}; release it first",
                content_hash=snapshot.content_hash,
            )
        cursor.execute("DELETE FROM snapshot WHERE content_hash = ?", [snapshot.content_hash])


def runs_needed_by_snapshots(cursor: duckdb.DuckDBPyConnection) -> set[str]:
    """Return the runs that a stored snapshot may select a row of.

    A row that only a later flag keeps out of a snapshot counts as selected.
    """
    needed: set[str] = set()
    for entry in fetch_snapshots(cursor):
        needed |= _runs_of(cursor, entry.pinned)
    return needed


@dataclass(frozen=True, slots=True)
class _Taken:
    """The content of a filter's rows, and the batches that were there to select from."""

    pinned: PinnedFilter
    numbers: Integers
    content_hash: str
    num_rows: int

    def describe(self) -> Snapshot:
        return Snapshot(
            content_hash=self.content_hash,
            num_rows=self.num_rows,
            selection=self.pinned.selection,
        )

    def is_still_there(self, cursor: duckdb.DuckDBPyConnection) -> bool:
        numbers = find_visible_batches(cursor, self.pinned).numbers
        return np.array_equal(self.numbers, numbers)


def _take(cursor: duckdb.DuckDBPyConnection, pinned: PinnedFilter) -> _Taken:
    batches = find_visible_batches(cursor, pinned)
    for entry in fetch_snapshots(cursor):
        if entry.pinned == pinned:
            known = entry.snapshot
            return _Taken(pinned, batches.numbers, known.content_hash, known.num_rows)
    content = hash_content(cursor, pinned, batches)
    return _Taken(pinned, batches.numbers, content.hexdigest(), content.num_rows)


def hash_content(
    cursor: duckdb.DuckDBPyConnection, pinned: PinnedFilter, batches: VisibleBatches
) -> ContentHash:
    """Return the hash of the rows a pinned filter selects."""
    content = ContentHash()
    for rows in scan_content(cursor, pinned, batches):
        content.add(rows)
    return content


def _runs_of(cursor: duckdb.DuckDBPyConnection, pinned: PinnedFilter) -> set[str]:
    batches = find_visible_batches(cursor, pinned)
    condition, values = find_row_condition(pinned.selection)
    query = (
        "SELECT DISTINCT batch_number FROM measurement "  # noqa: S608 - values are bound
        f"WHERE {batches.find_condition()} AND {condition}"
    )
    numbers = {number for (number,) in cursor.execute(query, values).fetchall()}
    run_ids = batches.table.column("run_id").to_pylist()
    return {
        run_id
        for number, run_id in zip(batches.numbers.tolist(), run_ids, strict=True)
        if number in numbers
    }
