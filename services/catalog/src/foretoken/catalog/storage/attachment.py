"""How the catalog's database is attached to DuckDB; all else reads and writes tables."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import duckdb

from foretoken.catalog.config import DEFAULT_MAX_LOG_BYTES
from foretoken.catalog.storage import database_file
from foretoken.catalog.storage.commit import (
    AcknowledgedFile,
    Commit,
    Loss,
    Note,
    Recorded,
    insert_commit,
    read_newest_commit,
)
from foretoken.catalog.storage.database_file import RollbackJournal
from foretoken.catalog.storage.literal import quote
from foretoken.domain.errors import CatalogBusyError, ForetokenError, InvalidRequestError

# The store merges the log itself: DuckDB would do it while other processes read the file.
_NEVER = "1000TB"
# A database file without content is its headers alone.
_EMPTY_FILE_BYTES = 3 * 4096


class Attachment(Protocol):
    """Where the tables lie."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def supports_primary_keys(self) -> bool:
        """Whether the engine keeps keys unique; without, only the one writer does."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes may write it, too."""

    def is_new(self) -> bool:
        """Return whether there is nothing yet, so that a catalog may be made.

        Raises:
            InvalidRequestError: it cannot be there at all.

        """

    @property
    def reachable_folders(self) -> tuple[str, ...]:
        """Folders that the database must reach to work, in addition to its own files."""

    def configure(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Set what it needs before it is attached; later nothing can be set any more."""

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Attach it as the database `store`, made when absent."""

    def attach_for_reading(self, connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
        """Attach it as `store` in another process than the one that has it open.

        `folder` takes what this needs.
        """

    def is_log_large(self, ratio: float = 1.0) -> bool:
        """Return whether a log has that part of the size at which it is to be merged."""

    def merge_log(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Merge the log into the tables; whenever the process dies, both or one is whole.

        Raises:
            StorageFullError, CatalogBusyError: the disk does not take what that needs.

        """

    def log_bytes(self) -> int:
        """Return the size of the log that is not merged into the tables yet, in bytes."""

    @property
    def lacks_note(self) -> bool:
        """Whether nothing outside the database says what it must hold, and something should."""

    def stamp(self, cursor: duckdb.DuckDBPyConnection, recorded: Recorded) -> None:
        """Give a transaction its number, at its end, with what it records."""

    def acknowledge(self) -> None:
        """Note outside the database that the transaction stamped last is on disk.

        Raises:
            StorageFullError, CatalogBusyError: the disk does not take the note.

        """

    def close(self) -> None:
        """Give back what it holds besides the database."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep other processes from writing until the end."""

    def explain(self, error: duckdb.Error) -> ForetokenError | None:
        """Return what an error says of this kind of storage, if it does."""

    def size_bytes(self) -> int:
        """Return the storage it takes, in bytes."""


class FileAttachment:
    """A DuckDB file and its write-ahead log, owned by one process, and the note next to them.

    The log is merged into the tables when it has `max_log_bytes`, while a commit waits for it.
    """

    def __init__(
        self,
        path: Path,
        max_log_bytes: int = DEFAULT_MAX_LOG_BYTES,
        *,
        is_accepting_loss: bool = False,
    ) -> None:
        """Keep where the file is, and whether to attach it without what was acknowledged."""
        self.path = path
        self._max_log_bytes = max_log_bytes
        self._is_accepting_loss = is_accepting_loss
        self._acknowledged = AcknowledgedFile(path)
        self._rollback = RollbackJournal(path)
        self._descriptor: int | None = None
        self._newest: Commit | None = None  # known while nothing failed
        self._stamped = Commit()

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def supports_primary_keys(self) -> bool:
        """DuckDB keeps keys unique."""
        return True

    @property
    def is_shared(self) -> bool:
        """One process has the file."""
        return False

    def is_new(self) -> bool:
        """Return whether the file is absent or holds no table; make its folder.

        Raises:
            InvalidRequestError: the path cannot be a file.

        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            num_bytes = self.path.stat().st_size if self.path.exists() else 0
        except OSError as err:
            raise InvalidRequestError.of_field("path", f"{self.path}: {err.strerror}") from err
        return num_bytes <= _EMPTY_FILE_BYTES

    @property
    def reachable_folders(self) -> tuple[str, ...]:
        """None: it is one file and its log."""
        return ()

    def configure(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Leave it to the store when to merge the log, and say what not to do then."""
        connection.execute(f"SET checkpoint_threshold = '{_NEVER}'")
        # Row groups are not merged while a commit waits, which takes seconds: compacting does it.
        connection.execute("SET max_vacuum_tasks = 0")
        connection.execute("PRAGMA disable_checkpoint_on_shutdown")

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Attach the file as the database `store`, made when absent.

        Raises:
            CatalogBusyError: another process, or another catalog of this one, has it open.
            IncompleteCatalogError: it lacks what was acknowledged; nothing was changed.
            CorruptCatalogError: nothing says what was acknowledged, though something should.

        """
        self._rollback.roll_back()
        if not self._is_accepting_loss:
            self._check(connection)
        database_file.attach_file(connection, self.path, "store")
        self._close_file()
        # Open for as long as the database is: closing a file gives up the locks on it that the
        # process has, DuckDB's too.
        self._descriptor = os.open(self.path, os.O_RDONLY)

    def attach_for_reading(self, connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
        """Attach the file as `store` without its lock, which another process has."""
        # Only the processes that answer SQL wait for what it needs.
        from foretoken.catalog.storage.shared_file import attach_shared

        attach_shared(connection, self.path.absolute(), "store", folder)

    def is_log_large(self, ratio: float = 1.0) -> bool:
        """Return whether the log has that part of `max_log_bytes`."""
        return self.log_bytes() >= ratio * self._max_log_bytes

    def merge_log(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Merge the log, and keep the blocks that DuckDB rewrites in place until it is done.

        Raises:
            StorageFullError, CatalogBusyError: the disk does not take these blocks.

        """
        if self._descriptor is None:
            raise CatalogBusyError(f"the catalog {self.path} is not open")
        rows = cursor.execute("SELECT block_id FROM pragma_metadata_info('store')").fetchall()
        with self._rollback.keep(self._descriptor, [block for (block,) in rows]):
            cursor.execute("CHECKPOINT store")

    def _check(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Compare the database with the note, as a reader: writing would hide what is missing."""
        note = self._acknowledged.read()
        if note is None:
            return
        found = read_commit_of(connection, self.path)
        if found.number < note.commit.number:
            raise Loss(self.path, note, found).as_error()

    def replace(self, copy: Path) -> None:
        """Put a file with the same content in the place of this one, whose log is empty.

        Whenever the process dies, one of the two is there, whole.
        """
        copy.replace(self.path)
        database_file.sync(self.path.parent)

    def log_bytes(self) -> int:
        """Return the size of the log, in bytes."""
        return database_file.log_bytes(self.path)

    @property
    def lacks_note(self) -> bool:
        """Whether the file is new, was an older Foretoken's, or came here without its note."""
        return not self._acknowledged.path.exists()

    def stamp(self, cursor: duckdb.DuckDBPyConnection, recorded: Recorded) -> None:
        """Give a transaction its number, at its end, with what it records."""
        newest, self._newest = self._newest or read_newest_commit(cursor), None
        self._stamped = newest.followed_by(recorded)
        insert_commit(cursor, self._stamped)

    def acknowledge(self) -> None:
        """Note next to the file that the transaction stamped last is on disk.

        Raises:
            StorageFullError, CatalogBusyError: the disk does not take the note.

        """
        self._newest = self._stamped
        self._acknowledged.write(Note(commit=self._stamped, log_bytes=self.log_bytes()))

    def close(self) -> None:
        """Close the note and the file, which DuckDB has closed before."""
        self._acknowledged.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def exclusive(self) -> AbstractContextManager[None]:
        """Do nothing: no other process has the file."""
        return nullcontext()

    def explain(self, error: duckdb.Error) -> ForetokenError | None:
        """Return nothing: what DuckDB says of files is known."""
        del error
        return None

    def size_bytes(self) -> int:
        """Return the size of the file and its log, in bytes."""
        return database_file.size_bytes(self.path)


def read_commit_of(connection: duckdb.DuckDBPyConnection, path: Path) -> Commit:
    """Return the newest commit in a database file and its log, which stay as they are."""
    if not path.exists() or not path.stat().st_size:
        return Commit()
    connection.execute(f"ATTACH {quote(str(path))} AS noted (READ_ONLY)")
    try:
        return read_newest_commit(connection, "noted")
    finally:
        connection.execute("DETACH noted")
