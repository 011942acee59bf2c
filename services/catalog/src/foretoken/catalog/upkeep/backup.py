"""Backups: a consistent copy of the catalog as a stream of bytes, and a catalog from one."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

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


class CatalogCopy:
    """A new file in the scratch folder with all that is committed, rows in their order.

    Deleted rows leave no room in it. It is attached next to the catalog as `name`, and deleted
    at the end if it is still there; the next opening deletes what a crash leaves.
    """

    def __init__(self, store: Store) -> None:
        """Give it a name that no other has."""
        self._store = store
        self.name = f"{COPY_PREFIX}{uuid.uuid4().hex}"
        self.path = store.scratch_folder / f"{self.name}.duckdb"
        self._is_attached = False

    def __enter__(self) -> Self:
        """Write it.

        Raises:
            StorageFullError: there is no room for it.

        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise InvalidRequestError.of_field(
                "path", f"{self.path.parent}: {err.strerror}"
            ) from err
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            with self._store.cursor() as cursor, self._errors_of_catalog():
                attach_file(cursor, self.path, self.name)
                self._is_attached = True
            with self.changed() as cursor:
                cursor.execute(f"COPY FROM DATABASE store TO {self.name}")
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Delete it."""
        self._end()

    @contextlib.contextmanager
    def changed(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Hand out a cursor that reads the catalog as of one moment, and writes the copy.

        What it wrote is in the file at the end, none of it in a log.
        """
        with self._store.cursor() as cursor, self._errors_of_catalog():
            cursor.begin()
            try:
                yield cursor
                cursor.commit()
            except BaseException:
                with contextlib.suppress(duckdb.Error):
                    cursor.rollback()
                raise
            cursor.execute(f"CHECKPOINT {self.name}")

    def detach(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Make it a file that nobody has open; nothing can be changed in it any more."""
        with self._errors_of_catalog():
            cursor.execute(f"DETACH DATABASE IF EXISTS {self.name}")
        self._is_attached = False

    def _end(self) -> None:
        # A catalog closed meanwhile has detached it.
        with contextlib.suppress(ForetokenError):
            if self._is_attached:
                with self._store.cursor() as cursor:
                    self.detach(cursor)
        delete_file(self.path)

    @contextlib.contextmanager
    def _errors_of_catalog(self) -> Iterator[None]:
        # Whatever is wrong is wrong with the catalog, or with the disk both are on.
        try:
            yield
        except duckdb.Error as err:
            raise translate(err, self._store.attachment.name) from err


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
    with CatalogCopy(store) as copy:
        with store.cursor() as cursor:
            copy.detach(cursor)
        file = copy.path.open("rb")
    # The name is gone, but what is open stays readable; nothing is left behind, whatever happens.
    with file:
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
