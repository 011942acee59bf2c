"""Snapshots: what a filter selected at a moment, named by its content and never changed.

A stored snapshot is the filter and the moment. Its rows are selected anew whenever they are read:
rows never change, and prune leaves those that a snapshot needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import duckdb
import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Integers
from foretoken.catalog.reading.content import ContentHash, hash_rows
from foretoken.catalog.reading.scan import scan_content
from foretoken.catalog.reading.selection import (
    PinnedFilter,
    VisibleBatches,
    find_row_condition,
    find_visible_batches,
    narrow_filter,
)
from foretoken.catalog.storage.store import Store, next_moment
from foretoken.domain.errors import InvalidRequestError, SnapshotInUseError, UnknownDatasetError
from foretoken.domain.measurements.measurement import (
    MeasurementFilter,
    Snapshot,
    SnapshotChange,
    SnapshotDiff,
)

# Fewer characters of a content hash are more likely a slip than a name.
_NAME_CHARS_MIN = 6
# Enough of a content hash for people to tell snapshots apart.
SHORT_NAME_CHARS = 12
_FILTER_FIELDS = (
    "operator",
    "device",
    "topology",
    "framework",
    "run_id",
    "model",
    "include_failed",
    "include_flagged",
)


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot and what selects its rows."""

    snapshot: Snapshot
    pinned: PinnedFilter


def find_snapshot(cursor: duckdb.DuckDBPyConnection, name: str) -> StoredSnapshot:
    """Return the stored snapshot of a content hash, or of the beginning of one.

    Raises:
        UnknownDatasetError: there is none; names the nearest.
        InvalidRequestError: the beginning is too short, or several begin so.

    """
    if len(name) < _NAME_CHARS_MIN:
        raise InvalidRequestError.of_field(
            "snapshot", f"{name!r} is too short; give at least {_NAME_CHARS_MIN} characters"
        )
    stored = fetch_snapshots(cursor)
    found = [entry for entry in stored if entry.snapshot.content_hash.startswith(name)]
    if not found:
        raise UnknownDatasetError.named(name, [_short_name(entry) for entry in stored])
    if len(found) > 1:
        names = ", ".join(sorted(_short_name(entry, len(name) + 4) for entry in found))
        raise InvalidRequestError.of_field("snapshot", f"{name!r} may be {names}; give more of it")
    return found[0]


def fetch_snapshots(cursor: duckdb.DuckDBPyConnection) -> list[StoredSnapshot]:
    """Return the stored snapshots with what selects their rows, newest first."""
    query = f"""
        SELECT content_hash, as_of, num_rows, created_at, holders, {", ".join(_FILTER_FIELDS)}
        FROM snapshot LEFT JOIN (
            SELECT content_hash, list(holder ORDER BY held_at, holder) AS holders
            FROM snapshot_holder GROUP BY content_hash
        ) USING (content_hash)
        ORDER BY created_at DESC, as_of DESC, content_hash
    """  # noqa: S608 - columns of our own
    found = []
    for content_hash, as_of, num_rows, created_at, holders, *fields in cursor.execute(
        query
    ).fetchall():
        selection = MeasurementFilter(**dict(zip(_FILTER_FIELDS, fields, strict=True)))
        snapshot = Snapshot(
            content_hash=content_hash,
            num_rows=num_rows,
            selection=selection,
            created_at=format_time(created_at),
            holders=tuple(holders or ()),
        )
        found.append(StoredSnapshot(snapshot, PinnedFilter(selection, as_of)))
    return found


def fetch_by_content(cursor: duckdb.DuckDBPyConnection, content_hash: str) -> StoredSnapshot | None:
    """Return the stored snapshot of exactly this content hash, if there is one."""
    stored = fetch_snapshots(cursor)
    return next((entry for entry in stored if entry.snapshot.content_hash == content_hash), None)


def insert_snapshot(
    cursor: duckdb.DuckDBPyConnection, snapshot: Snapshot, pinned: PinnedFilter, now: datetime
) -> None:
    """Store a snapshot that is not there; `now` is in UTC."""
    fields = {name: getattr(pinned.selection, name) for name in _FILTER_FIELDS}
    values = {
        "content_hash": snapshot.content_hash,
        "as_of": pinned.as_of,
        "num_rows": snapshot.num_rows,
        "created_at": now.replace(tzinfo=None),
        **fields,
    }
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    cursor.execute(f"INSERT INTO snapshot ({names}) VALUES ({marks})", list(values.values()))  # noqa: S608


def insert_holder(
    cursor: duckdb.DuckDBPyConnection, content_hash: str, holder: str, now: datetime
) -> None:
    """Let a holder hold a snapshot, once; `now` is in UTC."""
    cursor.execute(
        "INSERT INTO snapshot_holder SELECT $content_hash, $holder, $held_at WHERE NOT EXISTS"
        " (FROM snapshot_holder WHERE content_hash = $content_hash AND holder = $holder)",
        {"content_hash": content_hash, "holder": holder, "held_at": now.replace(tzinfo=None)},
    )


def format_time(moment: datetime | None) -> str:
    """Return a time the catalog stored as ISO 8601 UTC, and none as nothing."""
    return "" if moment is None else moment.isoformat(timespec="seconds") + "Z"


def _short_name(entry: StoredSnapshot, num_chars: int = SHORT_NAME_CHARS) -> str:
    return entry.snapshot.content_hash[:num_chars]


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
