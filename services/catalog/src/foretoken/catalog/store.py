"""The catalog's DuckDB file: one process owns it, its threads share it through cursors."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path

import duckdb
import pyarrow as pa

from foretoken.catalog.config import CatalogConfig
from foretoken.domain.errors import (
    CatalogBusyError,
    CorruptCatalogError,
    ForetokenError,
    InvalidRequestError,
    RunConflictError,
)
from foretoken.domain.measurement import BatchReceipt, Run
from foretoken.domain.operator import OperatorSpec, all_operators

# Files that DuckDB 1.5 can read too.
_STORAGE_VERSION = "v1.5.0"
# A database file without content is its headers alone.
_EMPTY_FILE_BYTES = 3 * 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedBatch:
    """Rows ready to be stored, in the columns of the table `measurement` after the first two."""

    batch_index: int
    rows: pa.Table
    num_flagged: int
    num_failed: int
    is_last: bool


class Store:
    """Opens the file, brings its schema up to date, and writes batches."""

    def __init__(self, config: CatalogConfig) -> None:
        self._config = config
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._write_lock = threading.Lock()

    def open(self) -> None:
        """Open the file, or make it.

        Raises:
            CatalogBusyError: another process, or another catalog of this one, has it open.
            CorruptCatalogError: it is not a catalog, is damaged, or is of a newer Foretoken.
            InvalidRequestError: the path cannot be a file.

        """
        path = Path(self._config.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            num_bytes = path.stat().st_size if path.exists() else 0
        except OSError as err:
            raise InvalidRequestError.of_field("path", f"{path}: {err.strerror}") from err
        settings: dict[str, str | bool | int | float | list[str]] = {
            "autoinstall_known_extensions": False
        }
        if self._config.num_threads:
            settings["threads"] = self._config.num_threads
        if self._config.memory_limit:
            settings["memory_limit"] = self._config.memory_limit
        with self._translated(), contextlib.ExitStack() as undo:
            connection = duckdb.connect(":memory:", config=settings)
            undo.callback(connection.close)
            literal = str(path).replace("'", "''")
            connection.execute(
                f"ATTACH '{literal}' AS store (STORAGE_VERSION '{_STORAGE_VERSION}'); USE store"
            )
            self._migrate(connection, is_new=num_bytes <= _EMPTY_FILE_BYTES)
            _create_operator_views(connection)
            undo.pop_all()
        self._connection = connection

    def close(self) -> None:
        """Close the file; harmless when it is not open."""
        if self._connection is not None:
            with self._write_lock:
                self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Hand out a cursor of its own for the calling thread, closed at the end."""
        if self._connection is None:
            raise CatalogBusyError(f"the catalog {self._config.path} is not open")
        with self._translated():
            cursor = self._connection.cursor()
            try:
                cursor.execute("USE store")
                yield cursor
            finally:
                cursor.close()

    def check_run(self, run: Run) -> None:
        """Check that a run of this id, if there is one, has the same content.

        Raises:
            RunConflictError: it has other content.

        """
        with self.cursor() as cursor:
            _check_run(cursor, run)

    def find_receipt(self, run_id: str, batch_index: int) -> BatchReceipt | None:
        """Return the receipt of a batch stored before."""
        with self.cursor() as cursor:
            return _find_receipt(cursor, run_id, batch_index)

    def insert(self, run: Run, batch: CheckedBatch, now: datetime) -> BatchReceipt:
        """Store a batch and its receipt in one transaction; return once it is on disk.

        Raises:
            RunConflictError: the run has other content, or was completed without this batch.

        """
        with self._write_lock, self.cursor() as cursor:
            cursor.begin()
            try:
                receipt = _find_receipt(cursor, run.run_id, batch.batch_index)
                if receipt is None:
                    receipt = _insert(cursor, run, batch, now)
                cursor.commit()
            except BaseException:
                with contextlib.suppress(duckdb.Error):
                    cursor.rollback()
                raise
        return receipt

    def _migrate(self, connection: duckdb.DuckDBPyConnection, *, is_new: bool) -> None:
        tables = {name for (name,) in connection.execute("SHOW TABLES").fetchall()}
        if "schema_version" not in tables and (tables or not is_new):
            raise CorruptCatalogError(f"{self._config.path} is a database but not a catalog")
        connection.begin()
        connection.execute(
            "CREATE TABLE IF NOT EXISTS schema_version (version INTEGER, name VARCHAR)"
        )
        applied = {
            v for (v,) in connection.execute("SELECT version FROM schema_version").fetchall()
        }
        migrations = _read_migrations()
        if applied - migrations.keys():
            connection.rollback()
            raise CorruptCatalogError(
                f"{self._config.path} has schema version {max(applied)}, this Foretoken knows "
                f"{max(migrations)}: use a newer Foretoken"
            )
        for version, (name, script) in sorted(migrations.items()):
            if version not in applied:
                connection.execute(script)
                connection.execute("INSERT INTO schema_version VALUES (?, ?)", [version, name])
        connection.commit()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except duckdb.Error as err:
            raise _translate(err, self._config.path) from err


def _read_migrations() -> dict[int, tuple[str, str]]:
    folder = files("foretoken.catalog").joinpath("migrations")
    scripts = [entry for entry in folder.iterdir() if entry.name.endswith(".sql")]
    return {
        int(entry.name[:4]): (entry.name.removesuffix(".sql"), entry.read_text(encoding="utf-8"))
        for entry in scripts
    }


def _create_operator_views(connection: duckdb.DuckDBPyConnection) -> None:
    connection.begin()
    for spec in all_operators().values():
        connection.execute(_view_of(spec))
    connection.commit()


def _view_of(spec: OperatorSpec) -> str:
    columns = ", ".join(f"dims['{name}'] AS \"{name}\"" for name in spec.dim_names)
    query = (
        f"SELECT {columns}, * EXCLUDE (operator, dims) "  # noqa: S608 - names from our own files
        f"FROM readable_measurement WHERE operator = '{spec.name}'"
    )
    return f'CREATE OR REPLACE VIEW "op_{spec.name}" AS {query}'


def _check_run(cursor: duckdb.DuckDBPyConnection, run: Run) -> bool:
    row = cursor.execute("SELECT content_hash FROM run WHERE run_id = ?", [run.run_id]).fetchone()
    if row is not None and row[0] != run.content_hash:
        raise RunConflictError(
            f"run {run.run_id} was recorded with other content; give this one another id",
            run_id=run.run_id,
        )
    return row is not None


def _find_receipt(
    cursor: duckdb.DuckDBPyConnection, run_id: str, batch_index: int
) -> BatchReceipt | None:
    row = cursor.execute(
        "SELECT num_rows, num_flagged FROM batch WHERE run_id = ? AND batch_index = ?",
        [run_id, batch_index],
    ).fetchone()
    if row is None:
        return None
    return BatchReceipt(
        run_id=run_id,
        batch_index=batch_index,
        num_rows=row[0],
        num_flagged=row[1],
        was_duplicate=True,
    )


def _insert(
    cursor: duckdb.DuckDBPyConnection, run: Run, batch: CheckedBatch, now: datetime
) -> BatchReceipt:
    started = now.replace(tzinfo=None)
    if not _check_run(cursor, run):
        environment = dict(run.environment)
        cursor.execute(
            "INSERT INTO run VALUES (?, ?, ?, ?, ?, ?, map(?::VARCHAR[], ?::VARCHAR[]), ?)",
            [
                run.run_id,
                run.kind.name.lower(),
                run.tool,
                run.content_hash,
                run.source,
                run.licence,
                list(environment),
                list(environment.values()),
                started,
            ],
        )
    last = cursor.execute(
        "SELECT max(batch_index) FROM batch WHERE run_id = ? AND is_last", [run.run_id]
    ).fetchone()
    if last is not None and last[0] is not None and batch.batch_index > last[0]:
        raise RunConflictError(
            f"run {run.run_id} ended with batch {last[0]}: batch {batch.batch_index} is too late",
            run_id=run.run_id,
        )
    num_rows = batch.rows.num_rows
    cursor.execute(
        "INSERT INTO batch VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            run.run_id,
            batch.batch_index,
            num_rows,
            batch.num_flagged,
            batch.num_failed,
            batch.is_last,
            started,
        ],
    )
    cursor.register("incoming", batch.rows)
    cursor.execute(
        "INSERT INTO measurement SELECT ?, ?, * FROM incoming", [run.run_id, batch.batch_index]
    )
    cursor.unregister("incoming")
    return BatchReceipt(
        run_id=run.run_id,
        batch_index=batch.batch_index,
        num_rows=num_rows,
        num_flagged=batch.num_flagged,
    )


# What DuckDB's messages say (in lower case), and what that means for the caller.
_MEANINGS: tuple[tuple[tuple[str, ...], type[ForetokenError], str], ...] = (
    (
        ("set lock on file", "already attached", "already open"),
        CatalogBusyError,
        "is open in another process; stop it, or talk to it over gRPC",
    ),
    (
        ("no space left", "input/output error", "could not write"),
        CatalogBusyError,
        "cannot write to its disk; make room and try again",
    ),
    (
        ("cannot open file", "is a directory", "permission denied"),
        InvalidRequestError,
        "cannot be opened; name a file that can be written",
    ),
    (
        ("storage version",),
        CorruptCatalogError,
        "is a database of a newer format, not a catalog of this program",
    ),
    (("out of memory",), CatalogBusyError, "has no memory left; raise memory_limit"),
)
_DAMAGE = (
    duckdb.IOException,
    duckdb.SerializationException,
    duckdb.InternalException,
    duckdb.FatalException,
    duckdb.CatalogException,
)


def _translate(error: duckdb.Error, path: str) -> ForetokenError:
    """Return the error a caller can act on for what DuckDB says."""
    text = str(error).lower()
    for phrases, kind, meaning in _MEANINGS:
        if any(phrase in text for phrase in phrases):
            return kind(f"the catalog {path} {meaning}: {error}")
    if isinstance(error, _DAMAGE):
        return CorruptCatalogError(
            f"{path} cannot be read as a catalog; restore it from a backup: {error}"
        )
    return ForetokenError(f"the catalog {path} failed: {error}")
