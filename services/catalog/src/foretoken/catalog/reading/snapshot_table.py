"""The stored snapshots: what each is named, selects and is held by."""

from dataclasses import dataclass
from datetime import datetime

import duckdb

from foretoken.catalog.reading.selection import PinnedFilter
from foretoken.domain.errors import InvalidRequestError, UnknownDatasetError
from foretoken.domain.measurements.measurement import MeasurementFilter, Snapshot

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
