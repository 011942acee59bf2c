"""Backups: a consistent copy of the catalog as a stream of bytes, and a catalog from one."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import duckdb

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.storage.database_file import (
    attach_file,
    companions_of,
    delete_file,
    log_of,
    sync,
)
from foretoken.catalog.storage.error import translate
from foretoken.catalog.storage.literal import quote
from foretoken.catalog.storage.store import COPY_PREFIX, Store
from foretoken.domain.errors import (
    CatalogBusyError,
    CorruptCatalogError,
    ForetokenError,
    InvalidRequestError,
)


def copy_catalog(store: Store) -> Path:
    """Write all that is committed to a new file in the scratch folder, rows in their order.

    Deleted rows leave no room in it. Whoever calls this deletes it; the next opening does else.

    Raises:
        StorageFullError: there is no room for a copy.

    """
    name = f"{COPY_PREFIX}{uuid.uuid4().hex}"
    path = store.scratch_folder / f"{name}.duckdb"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise InvalidRequestError.of_field("path", f"{path.parent}: {err.strerror}") from err
    with contextlib.ExitStack() as undo, store.cursor() as cursor:
        undo.callback(delete_file, path)
        try:
            _copy(cursor, path, name)
        except duckdb.Error as err:
            # Whatever is wrong is wrong with the catalog, or with the disk both are on.
            raise translate(err, store.attachment.name) from err
        undo.pop_all()
    return path


def _copy(cursor: duckdb.DuckDBPyConnection, path: Path, name: str) -> None:
    attach_file(cursor, path, name)
    try:
        # One transaction: all tables as they were at one moment.
        cursor.begin()
        cursor.execute(f"COPY FROM DATABASE store TO {name}")
        cursor.commit()
        cursor.execute(f"CHECKPOINT {name}")  # all in the file, none in its log
    except duckdb.Error:
        with contextlib.suppress(duckdb.Error):
            cursor.rollback()
        raise
    finally:
        cursor.execute(f"DETACH {name}")


_PIECE_BYTES = 2 * 2**20
# Rows that a batch does not have, or that have no batch.
_TORN_BATCHES = """
    SELECT count(*) FROM (
        SELECT batch_number, count(*) AS num_rows FROM measurement GROUP BY batch_number
    ) AS stored
    FULL JOIN batch USING (batch_number)
    WHERE coalesce(stored.num_rows, 0) IS DISTINCT FROM batch.num_rows
"""
# Artifacts whose content has not the size it is known by, or content of no artifact.
_TORN_ARTIFACTS = """
    SELECT count(*) FROM (
        SELECT kind, name, sum(octet_length(content)) AS num_bytes FROM artifact_chunk GROUP BY ALL
    ) AS stored
    FULL JOIN artifact USING (kind, name)
    WHERE coalesce(stored.num_bytes, 0) IS DISTINCT FROM artifact.num_bytes
"""
# Reads every block, and with it the checksum of every block.
_READ_ALL = "SELECT bit_xor(hash({table})) FROM {table}"
_LARGE_TABLES = ("measurement", "artifact_chunk")


def stream_backup(store: Store) -> Iterator[bytes]:
    """Yield a copy of the catalog in pieces of 2 MiB.

    It holds what was acknowledged before the first piece is asked for. Recording goes on.

    Raises:
        StorageFullError: there is no room next to the catalog for a copy.

    """
    path = copy_catalog(store)
    with path.open("rb") as file:
        path.unlink()  # what is open stays readable; nothing is left behind, whatever happens
        while piece := file.read(_PIECE_BYTES):
            yield piece


def restore_backup(source: Path, target: Path, *, is_replacing: bool = False) -> Path | None:
    """Make a backup the catalog at `target`, brought up to this program's schema.

    The catalog that is there is kept, with `.old` after its name, if `is_replacing`; returns where.

    Raises:
        InvalidRequestError: there is a catalog already, or no backup.
        CatalogBusyError: a process has the catalog open.
        CorruptCatalogError: the backup is damaged, no catalog, or of a newer Foretoken.

    """
    source, target = source.absolute(), target.absolute()
    kept = _find_place_of_old(target, is_replacing=is_replacing)
    fresh = target.with_name(target.name + ".restoring")
    with contextlib.ExitStack() as undo:
        undo.callback(delete_file, fresh)
        _copy_file(source, fresh)
        _check(fresh, source)
        _move_away(target, kept)
        fresh.replace(target)
    sync(target.parent)
    return kept if kept.exists() else None


def _find_place_of_old(target: Path, *, is_replacing: bool) -> Path:
    """Return where to keep the catalog that is there, if one is; check that nobody uses it."""
    kept = target.with_name(target.name + ".old")
    for file in (kept, *companions_of(kept)):
        if file.exists():
            raise InvalidRequestError.of_field("path", f"{file} is in the way; move it elsewhere")
    if not target.exists():
        return kept
    if not is_replacing:
        raise InvalidRequestError.of_field("path", f"{target} exists; replace it or name another")
    try:
        with _attached(target):
            pass
    except CatalogBusyError:
        raise
    except ForetokenError:
        pass  # a damaged one is what a backup is for
    return kept


def _copy_file(source: Path, fresh: Path) -> None:
    if log_of(source).exists():
        raise InvalidRequestError.of_field(
            "path", f"{source} has a log next to it: a catalog in use or crashed, and no backup"
        )
    try:
        fresh.parent.mkdir(parents=True, exist_ok=True)
        delete_file(fresh)
        shutil.copyfile(source, fresh)
        sync(fresh)
    except OSError as err:
        raise InvalidRequestError.of_field("path", f"{err.filename}: {err.strerror}") from err


def _check(fresh: Path, source: Path) -> None:
    """Check that the copy is a whole catalog, and bring its schema up to date."""
    try:
        with _attached(fresh) as connection:
            connection.execute("SELECT version FROM backup.schema_version").fetchall()
        store = Store(CatalogConfig(path=str(fresh)))
        store.open()
        try:
            with store.cursor() as cursor:
                ((num_torn,),) = cursor.execute(_TORN_BATCHES).fetchall()
                ((num_torn_artifacts,),) = cursor.execute(_TORN_ARTIFACTS).fetchall()
                for table in _LARGE_TABLES:
                    cursor.execute(_READ_ALL.format(table=table)).fetchall()
        finally:
            store.close()
    except ForetokenError as err:
        raise CorruptCatalogError(f"{source} cannot be restored: {err.message}") from err
    for count, what in ((num_torn, "batches"), (num_torn_artifacts, "artifacts")):
        if count:
            raise CorruptCatalogError(f"{source} cannot be restored: {count} {what} are not whole")


@contextlib.contextmanager
def _attached(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a file for reading, as `backup`, apart from all else."""
    with duckdb.connect(":memory:") as connection:
        try:
            connection.execute(f"ATTACH {quote(str(path))} AS backup (READ_ONLY)")
            yield connection
        except duckdb.Error as err:
            raise translate(err, str(path)) from err


def _move_away(target: Path, kept: Path) -> None:
    """Give the catalog that is there another name, or what is left of one.

    Its note goes last: a catalog that lost its log in between is refused.
    """
    if target.exists():
        # Both names for a moment: at no time is there no catalog.
        kept.hardlink_to(target)
    for file, place in zip(companions_of(target), companions_of(kept), strict=True):
        if file.exists():
            file.replace(place)
