"""Where records of jobs lie: a file next to the catalog's, or the PostgreSQL of a lake.

Not among the measurements: what changes every second would have their readers open them anew, and
in a lake be a version of it each time.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb

from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.catalog.storage.error import translate, translated
from foretoken.catalog.storage.lake import WriterLock, explain_lake, load_extension
from foretoken.catalog.storage.literal import quote
from foretoken.domain.errors import ForetokenError

_TABLES = """
    CREATE TABLE IF NOT EXISTS job_record (
        job_id VARCHAR, service VARCHAR, job_json VARCHAR, request_json VARCHAR, version VARCHAR,
        worker VARCHAR, lease_ends_s DOUBLE, num_leases BIGINT, num_interruptions BIGINT,
        is_unwanted BOOLEAN, is_final BOOLEAN, change_number BIGINT
    );
    CREATE TABLE IF NOT EXISTS job_piece (
        job_id VARCHAR, name VARCHAR, first_byte BIGINT, num_bytes BIGINT, content BLOB
    );
"""
# A few thousand short rows, and pieces of 16 KiB of which some 2,000 are read at once.
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "memory_limit": "256MB",
    "autoinstall_known_extensions": False,
}


class JobDatabase:
    """Opens the database when it is first used; safe to use from several threads."""

    def __init__(self, config: CatalogConfig) -> None:
        """Keep where it lies."""
        self._path = Path(f"{config.path}.jobs").expanduser()
        self._lake = config.lake
        self._lock = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._writers = (
            WriterLock(self._lake.postgres, _lock_name(self._lake)) if self._lake else None
        )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Hand out a connection that alone reads and writes; at the end that is on disk, or undone.

        Raises:
            CatalogBusyError: another process has the file open, or PostgreSQL does not answer.
            StorageFullError: the disk is full.

        """
        with self._lock, translated(self._explain):
            connection = self._open()
            # Taken before the transaction, which would not see what came while it waited.
            with self._writers.hold() if self._writers else contextlib.nullcontext():
                connection.begin()
                try:
                    yield connection
                    connection.commit()
                except BaseException as err:
                    with contextlib.suppress(duckdb.Error):
                        connection.rollback()
                    if isinstance(err, duckdb.Error):
                        # The disk was full, or PostgreSQL started anew: opened again next time.
                        self._close()
                    raise

    def close(self) -> None:
        """Close it; harmless where it is not open."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        if self._writers is not None:
            self._writers.close()

    def _open(self) -> duckdb.DuckDBPyConnection:
        if self._connection is None:
            with contextlib.ExitStack() as undo:
                connection = duckdb.connect(":memory:", config=_SETTINGS)
                undo.callback(connection.close)
                connection.execute("SET enable_progress_bar = false")
                if self._lake is None:
                    connection.execute(f"ATTACH {quote(str(self._path))} AS jobs")
                    connection.execute("USE jobs")
                else:
                    _attach_postgres(connection, self._lake)
                connection.execute(_TABLES)
                undo.pop_all()
            self._connection = connection
        return self._connection

    def _explain(self, error: duckdb.Error) -> ForetokenError:
        if self._lake is not None and (found := explain_lake(error, self._lake.data_path)):
            return found
        return translate(error, str(self._path))


def _lock_name(lake: LakeConfig) -> str:
    return f"foretoken jobs {lake.schema_name}"


def _attach_postgres(connection: duckdb.DuckDBPyConnection, lake: LakeConfig) -> None:
    load_extension(connection, "postgres_scanner")
    connection.execute(f"ATTACH {quote(lake.postgres)} AS jobs (TYPE postgres)")
    schema = f"{lake.schema_name}_jobs"
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS jobs.{schema}")
    connection.execute(f"USE jobs.{schema}")
