"""How the catalog's database is attached to DuckDB; all else reads and writes tables."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import duckdb

from foretoken.catalog.storage import database_file
from foretoken.catalog.storage.shared_file import attach_shared
from foretoken.domain.errors import ForetokenError, InvalidRequestError

# Some 500,000 rows of small batches, which take a second to read at the opening after a crash.
_MAX_LOG_BYTES = 128 * 10**6
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
        """Folders that the database must reach to work, beside its own files."""

    def configure(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Set what it needs before it is attached; later nothing can be set any more."""

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Attach it as the database `store`, made when absent."""

    def attach_for_reading(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Attach it as `store` in another process than the one that has it open."""

    def is_log_large(self, ratio: float = 1.0) -> bool:
        """Return whether a log has that part of the size at which it is to be merged."""

    def close(self) -> None:
        """Give back what it holds beside the database."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep other processes from writing until the end."""

    def explain(self, error: duckdb.Error) -> ForetokenError | None:
        """Return what an error says of this kind of storage, if it does."""

    def size_bytes(self) -> int:
        """Return the storage it takes, in bytes."""


@dataclass(frozen=True, slots=True)
class FileAttachment:
    """A DuckDB file and its write-ahead log, owned by one process.

    The log is merged into the tables when it has `max_log_bytes`, while a commit waits for it.
    """

    path: Path
    max_log_bytes: int = _MAX_LOG_BYTES

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

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Attach the file as the database `store`, made when absent."""
        database_file.attach_file(connection, self.path, "store")

    def attach_for_reading(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Attach the file as `store` without its lock, which another process has."""
        attach_shared(connection, self.path.absolute(), "store")

    def is_log_large(self, ratio: float = 1.0) -> bool:
        """Return whether the log has that part of `max_log_bytes`."""
        return database_file.log_bytes(self.path) >= ratio * self.max_log_bytes

    def replace(self, copy: Path) -> None:
        """Put a file with the same content in the place of this one, whose log is empty.

        Whenever the process dies, one of the two is there, whole.
        """
        copy.replace(self.path)
        database_file.sync(self.path.parent)

    def close(self) -> None:
        """Do nothing: the file is closed with its database."""

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
