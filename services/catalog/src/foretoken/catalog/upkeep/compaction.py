"""Compaction: a catalog's files written anew, while others record and read.

DuckDB uses the room of deleted rows, but does not give it back to the disk. So a file is copied
as it was at one moment; what changed meanwhile is brought into the copy, again and again, and less
each time. Recording waits for the last time alone, after which the copy takes the file's place.
Until then the catalog is the old file and its log, whatever happens; from then on the new file,
which had all that was acknowledged on the disk before.
"""

import logging
import time

import duckdb

from foretoken.catalog.storage.attachment import FileAttachment
from foretoken.catalog.storage.lake import LakeAttachment
from foretoken.catalog.storage.store import Store
from foretoken.catalog.upkeep.backup import CatalogCopy
from foretoken.domain.errors import CatalogBusyError
from foretoken.domain.measurements.measurement import CompactReport

# Long enough for most reads to end; whoever reads longer makes compacting fail, not wait.
_IDLE_WAIT_S = 60.0
# Recording waits as long for a moment without readers, then goes on for a while.
_TRY_S = 0.25
# What came during one round is brought in by the next, in a small part of its time.
_MAX_ROUNDS = 5
_FEW_ROWS = 10_000

# Tables whose rows have a number that is never used again, and do not change.
_NUMBERED = {
    "measurement": "batch_number",
    "batch": "batch_number",
    "review": "review_number",
    "pruning": "pruning_number",
    "write_commit": "commit_number",
}
_DELETED_BATCHES = """
    SELECT batch_number FROM {copy}.batch
    WHERE batch_number NOT IN (SELECT batch_number FROM store.batch)
"""
# Files by their content: those of the first database that the second has not.
_OTHER_ARTIFACTS = """
    SELECT kind, name FROM {one}.artifact
    ANTI JOIN {other}.artifact USING (kind, name, content_hash)
"""

_log = logging.getLogger(__name__)


def compact(store: Store, idle_wait_s: float = _IDLE_WAIT_S) -> CompactReport:
    """Write the catalog's files anew, without the room that deleted rows left.

    Recording and reading go on but for a moment at the end, when the new file takes the place of
    the old one, which waits until nobody reads.

    Raises:
        CatalogBusyError: it was being read all the time; all is as before.
        StorageFullError: there is no room next to the catalog for the new file.

    """
    start_s = time.perf_counter()
    bytes_before = store.size_bytes()
    if isinstance(store.attachment, FileAttachment):
        with store.rewriting(), CatalogCopy(store) as copy:
            replace_by(copy, store, store.attachment, idle_wait_s)
    elif isinstance(store.attachment, LakeAttachment):
        with store.cursor() as cursor:
            store.attachment.compact(cursor)
    return CompactReport(
        bytes_before=bytes_before,
        bytes_after=store.size_bytes(),
        wall_s=time.perf_counter() - start_s,
    )


def replace_by(
    copy: CatalogCopy, store: Store, attachment: FileAttachment, idle_wait_s: float
) -> None:
    """Put a copy in the place of the file, with all that was written since it was begun.

    Raises:
        CatalogBusyError: the file was being read all the time; all is as before.

    """
    end_s: float | None = None
    while end_s is None or time.monotonic() < end_s:
        for _ in range(_MAX_ROUNDS):
            if _catch_up(copy) <= _FEW_ROWS:
                break
        # Before recording waits: the log that is left to merge meanwhile is short.
        store.merge_log()
        end_s = end_s or time.monotonic() + idle_wait_s
        begun_s = time.monotonic()
        with store.exclusive():
            _catch_up(copy)
            with store.idle(min(_TRY_S, idle_wait_s)) as cursor:
                if cursor is not None:
                    copy.detach(cursor)
                    attachment.replace(copy.path)
        waited_s = time.monotonic() - begun_s
        is_done = cursor is not None
        _log.info("compacting; is_done=%s recording_waited_s=%.3f", is_done, waited_s)
        if is_done:
            return
        time.sleep(min(_TRY_S, idle_wait_s))
    raise CatalogBusyError(
        f"the catalog {attachment.name} was read for {idle_wait_s:g} s with no break; "
        "try again when fewer do"
    )


def _catch_up(copy: CatalogCopy) -> int:
    """Make the copy what the catalog is now; return how many measurements that took."""
    with copy.changed() as cursor:
        _forget_deleted(cursor, copy.name)
        _bring_artifacts(cursor, copy.name)
        num_rows = 0
        for table in _tables(cursor):
            if table in _NUMBERED:
                added = _bring_newer(cursor, copy.name, table, _NUMBERED[table])
                num_rows += added if table == "measurement" else 0
            elif table != "artifact_chunk":
                _bring_difference(cursor, copy.name, table)
    return num_rows


def _tables(cursor: duckdb.DuckDBPyConnection) -> list[str]:
    rows = cursor.execute(
        "SELECT table_name FROM duckdb_tables() WHERE database_name = 'store' ORDER BY table_oid"
    ).fetchall()
    return [table for (table,) in rows]


def _count(cursor: duckdb.DuckDBPyConnection, statement: str) -> int:
    return int(cursor.execute(statement).fetchall()[0][0])


def _forget_deleted(cursor: duckdb.DuckDBPyConnection, copy: str) -> None:
    deleted = cursor.execute(_DELETED_BATCHES.format(copy=copy)).fetchall()
    if not deleted:
        return
    numbers = {"numbers": [number for (number,) in deleted]}
    for table in ("measurement", "batch"):
        cursor.execute(
            f"DELETE FROM {copy}.{table}"  # noqa: S608 - names of ours
            " WHERE batch_number IN (SELECT unnest($numbers::BIGINT[]))",
            numbers,
        )


def _bring_newer(cursor: duckdb.DuckDBPyConnection, copy: str, table: str, number: str) -> int:
    """Add the rows with a higher number than any in the copy, in their order."""
    newest = _count(cursor, f"SELECT coalesce(max({number}), -1) FROM {copy}.{table}")  # noqa: S608
    return _count(
        cursor,
        f"INSERT INTO {copy}.{table} FROM store.{table} WHERE {number} > {newest}",
    )


def _bring_artifacts(cursor: duckdb.DuckDBPyConnection, copy: str) -> None:
    """Bring the content of files in; what is known of them is a table like others."""
    gone = _OTHER_ARTIFACTS.format(one=copy, other="store")
    new = _OTHER_ARTIFACTS.format(one="store", other=copy)
    cursor.execute(f"DELETE FROM {copy}.artifact_chunk WHERE (kind, name) IN ({gone})")  # noqa: S608
    cursor.execute(
        f"INSERT INTO {copy}.artifact_chunk FROM store.artifact_chunk WHERE (kind, name) IN ({new})"
    )


def _bring_difference(cursor: duckdb.DuckDBPyConnection, copy: str, table: str) -> None:
    """Add the rows that the copy has not; where it has others, write the table anew."""
    here, there = f"FROM store.{table}", f"FROM {copy}.{table}"
    if _count(cursor, f"SELECT count(*) FROM ({there} EXCEPT ALL {here})"):  # noqa: S608
        cursor.execute(f"DELETE {there}")
        cursor.execute(f"INSERT INTO {copy}.{table} {here}")
    else:
        cursor.execute(f"INSERT INTO {copy}.{table} ({here} EXCEPT ALL {there})")
