"""The catalog as a DuckLake: metadata in PostgreSQL, rows as Parquet files, several writers.

DuckLake has no unique keys, so two writers could store one batch twice or give one number to two.
Two things in PostgreSQL keep them apart. A lock lets one process write at a time; it only saves
work that would be in vain, and may be lost with its connection. What counts is the primary key of
DuckLake's own table of snapshots: a transaction commits as the successor of the snapshot it read,
so of two that read the same only one can. DuckLake would by default put the other on top of the
first; it is configured not to, and the caller starts over with what is there now.
"""

import contextlib
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb

from foretoken.catalog.config import LakeConfig
from foretoken.catalog.storage.commit import Recorded
from foretoken.catalog.storage.error import Meanings, explain
from foretoken.catalog.storage.literal import quote
from foretoken.domain.errors import (
    CatalogBusyError,
    CorruptCatalogError,
    ForetokenError,
    InvalidRequestError,
)


def load_extension(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    """Load an extension of DuckDB, which checks that it was signed by its makers.

    Raises:
        InvalidRequestError: there is none for this version of DuckDB.

    """
    try:
        connection.execute(f"LOAD {quote(_packaged_file(name) or name)}")
    except duckdb.Error as err:
        raise InvalidRequestError.of_field(
            "lake",
            f"DuckDB {duckdb.__version__} has no extension {name} here; "
            "pip install 'foretoken[lake]' brings both in versions that fit",
        ) from err


def _packaged_file(name: str) -> str | None:
    """Return the file of a package made for exactly this DuckDB."""
    package = find_spec(f"duckdb_extension_{name}")
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    file = f"extensions/v{duckdb.__version__}/{name}.duckdb_extension"
    return next((str(Path(f) / file) for f in folders if (Path(f) / file).exists()), None)


_WAIT_S = 60
# A process that stops answering in the middle of a transaction keeps the others out this long.
_IDLE_S = 300


class WriterLock:
    """An advisory lock, held by a transaction: it ends with its process or its connection.

    Threads of this process wait for each other, too.

    DuckDB reaches PostgreSQL here from a database of its own, which has nothing else in it.
    """

    def __init__(self, postgres: str, name: str) -> None:
        """Keep how to reach PostgreSQL, and what the lock is called there."""
        self._postgres = postgres
        self._name = name
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._thread_lock = threading.Lock()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Wait for the lock, and hold it until the end.

        Raises:
            duckdb.Error: PostgreSQL cannot be reached, or others do not let go.

        """
        with self._thread_lock:
            connection = self._take()
            try:
                yield
            finally:
                with contextlib.suppress(duckdb.Error):  # lost with its connection
                    connection.commit()

    def ask(self, query: str) -> Any:
        """Return the first value a query of PostgreSQL has; safe while the lock is held."""
        with self._connect().cursor() as cursor:
            return _ask(cursor, query)

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _take(self) -> duckdb.DuckDBPyConnection:
        connection = self._connect()
        try:
            self._wait(connection)
        except duckdb.Error as err:
            if "lock timeout" in str(err):
                raise
            # PostgreSQL may have been started anew since the last time.
            self.close()
            connection = self._connect()
            self._wait(connection)
        return connection

    def _wait(self, connection: duckdb.DuckDBPyConnection) -> None:
        connection.begin()
        try:
            for setting, seconds in (
                ("lock_timeout", _WAIT_S),
                ("idle_in_transaction_session_timeout", _IDLE_S),
            ):
                _ask(connection, f"SELECT set_config('{setting}', '{seconds}s', true)")
            key = f"hashtextextended({quote(self._name)}, 0)"
            _ask(connection, f"SELECT true AS taken FROM pg_advisory_xact_lock({key})")  # noqa: S608
        except duckdb.Error:
            with contextlib.suppress(duckdb.Error):
                connection.rollback()
            raise

    def _connect(self) -> duckdb.DuckDBPyConnection:
        if self._connection is None:
            with contextlib.ExitStack() as undo:
                connection = duckdb.connect(
                    ":memory:", config={"autoinstall_known_extensions": False, "threads": 1}
                )
                undo.callback(connection.close)
                connection.execute("SET enable_progress_bar = false")
                load_extension(connection, "postgres_scanner")
                connection.execute(f"ATTACH {quote(self._postgres)} AS postgres (TYPE postgres)")
                undo.pop_all()
            self._connection = connection
        return self._connection


def _ask(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    row = connection.execute(f"FROM postgres_query('postgres', {quote(query)})").fetchone()
    return row[0] if row else None


# PostgreSQL's scanner first: DuckLake would look for it by itself.
_EXTENSIONS = ("postgres_scanner", "ducklake")
_S3_EXTENSIONS = ("httpfs", "aws")
# Fewer rows than this lie in PostgreSQL until the next compaction: the receipts and reviews of a
# commit, which would be a Parquet file each. A thousand rows are slower there than in a file.
_MAX_INLINE_ROWS = 100
# What is large enough that deleted rows are worth a file written anew.
_TABLES_OF_FILES = ("measurement", "artifact_chunk")
# Files that nothing refers to any more stay this long for readers that began before.
_READER_GRACE = "INTERVAL 1 HOUR"
# Files nobody ever referred to, of writers that died. A live one takes far less for its own.
_ORPHAN_GRACE = "INTERVAL 1 DAY"

_MEANINGS: Meanings = (
    (
        ("maximum retry count", "lock timeout"),
        CatalogBusyError,
        "is being written by other processes; send again what has no receipt",
    ),
    (
        ("fatal:  database", "fatal:  role", "password authentication", "no pg_hba.conf entry"),
        InvalidRequestError,
        "is refused by PostgreSQL; look at lake.postgres and the PG* variables",
    ),
    (
        ("connect to postgres", "connection to server", "server closed", "terminating connection"),
        CatalogBusyError,
        "cannot reach PostgreSQL; try again when it runs",
    ),
    (
        ("data_path parameter",),
        InvalidRequestError,
        "has its rows elsewhere; look at lake.data_path and lake.schema_name",
    ),
    (
        ("nosuchbucket", "accessdenied", "invalidaccesskeyid", "http code 403", "secret valid"),
        InvalidRequestError,
        "cannot use its bucket; look at lake.data_path and the AWS_* variables",
    ),
    (
        ("http code 404", "no such file", "no files found"),
        CorruptCatalogError,
        "lacks a file of rows; restore the bucket or folder from a backup",
    ),
    (
        ("http error", "http code", "could not establish connection", "could not connect"),
        CatalogBusyError,
        "cannot reach its object store; try again when it runs",
    ),
)
# A failed commit says first what failed and last why; between them it quotes all it was to write.
_MAX_END_CHARS = 250


class LakeAttachment:
    """A DuckLake that several processes have open at once."""

    def __init__(self, config: LakeConfig) -> None:
        """Keep the configuration."""
        self._config = config
        self._lock = WriterLock(config.postgres, f"foretoken catalog {config.schema_name}")

    @property
    def name(self) -> str:
        """Where the rows lie."""
        return self._config.data_path

    @property
    def supports_primary_keys(self) -> bool:
        """DuckLake knows no keys."""
        return False

    @property
    def is_shared(self) -> bool:
        """Several processes write it."""
        return True

    def is_new(self) -> bool:
        """Return true: a schema of PostgreSQL without tables is as good as none."""
        return True

    @property
    def reachable_folders(self) -> tuple[str, ...]:
        """Where the rows lie."""
        return (self._config.data_path,)

    def configure(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Load what DuckDB needs to reach PostgreSQL and the bucket or folder.

        Raises:
            InvalidRequestError: this DuckDB lacks an extension, or the folder cannot be made.

        """
        config = self._config
        is_remote = config.data_path.startswith("s3://")
        for name in (*_EXTENSIONS, *(_S3_EXTENSIONS if is_remote else ())):
            load_extension(connection, name)
        if is_remote:
            _name_object_store(connection, config)
        else:
            _make_folder(config.data_path)
        connection.execute("SET GLOBAL ducklake_max_retry_count = 0")

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Attach the lake as the database `store`, made when absent."""
        self._attach(connection, f"DATA_INLINING_ROW_LIMIT {_MAX_INLINE_ROWS}")

    def attach_for_reading(self, connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
        """Attach the lake as `store`, which nothing is written to."""
        del folder
        self._attach(connection, "READ_ONLY")

    def is_log_large(self, ratio: float = 1.0) -> bool:
        """Return false: PostgreSQL has the log."""
        del ratio
        return False

    def merge_log(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Bring the lake in order, as far as DuckLake does so by itself."""
        cursor.execute("CHECKPOINT store")

    def log_bytes(self) -> int:
        """Return none: PostgreSQL merges its own log."""
        return 0

    @property
    def lacks_note(self) -> bool:
        """Nothing: PostgreSQL itself finds damage in its log, and has what it committed."""
        return False

    def stamp(self, cursor: duckdb.DuckDBPyConnection, recorded: Recorded) -> None:
        """Do nothing: DuckLake numbers what it commits."""

    def acknowledge(self) -> None:
        """Do nothing: a commit of PostgreSQL is on its disk."""

    def close(self) -> None:
        """Let go of PostgreSQL."""
        self._lock.close()

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from writing until the end."""
        return self._lock.hold()

    def explain(self, error: duckdb.Error) -> ForetokenError | None:
        """Return what an error says of PostgreSQL, the bucket or other writers, if it does."""
        return explain_lake(error, self.name)

    def size_bytes(self) -> int:
        """Return the size of the Parquet files that readers may need, in bytes."""
        sizes = " UNION ALL ".join(
            f'SELECT file_size_bytes FROM "{self._config.schema_name}".{table}'  # noqa: S608 - a checked name
            for table in ("ducklake_data_file", "ducklake_delete_file")
        )
        total = "coalesce(sum(file_size_bytes), 0)::BIGINT"
        return int(self._lock.ask(f"SELECT {total} FROM ({sizes}) AS files"))  # noqa: S608

    def compact(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Merge small files, write what lies in PostgreSQL into files, delete what nobody needs.

        Others may write between one merged file and the next.
        """
        expired = f"older_than => now() - {_READER_GRACE}"
        orphaned = f"older_than => now() - {_ORPHAN_GRACE}"
        with self.exclusive():
            _call(connection, "ducklake_flush_inlined_data('store')")
        for table in _TABLES_OF_FILES:
            with self.exclusive():
                _call(connection, f"ducklake_rewrite_data_files('store', '{table}')")
        num_merged = 1
        while num_merged:
            with self.exclusive():
                num_merged = _call(
                    connection, "ducklake_merge_adjacent_files('store', max_compacted_files => 1)"
                )
        with self.exclusive():
            _call(connection, f"ducklake_expire_snapshots('store', {expired})")
            _call(connection, f"ducklake_cleanup_old_files('store', {expired})")
            _call(connection, f"ducklake_delete_orphaned_files('store', {orphaned})")

    def _attach(self, connection: duckdb.DuckDBPyConnection, option: str) -> None:
        config = self._config
        connection.execute(
            f"ATTACH {quote('ducklake:postgres:' + config.postgres)} AS store ("
            f"DATA_PATH {quote(config.data_path)}, METADATA_SCHEMA {quote(config.schema_name)}, "
            f"{option})"
        )


def explain_lake(error: duckdb.Error, name: str) -> ForetokenError | None:
    """Return what an error says of the PostgreSQL or the bucket of a lake of that name."""
    text = str(error)
    if len(text) > 2 * _MAX_END_CHARS:
        text = f"{text[:_MAX_END_CHARS]} ... {text[-_MAX_END_CHARS:]}"
    return explain(text, name, _MEANINGS)


def _name_object_store(connection: duckdb.DuckDBPyConnection, config: LakeConfig) -> None:
    """Say where the object store is; DuckDB finds the keys as AWS's tools do."""
    options = ["TYPE s3", "PROVIDER credential_chain", "REFRESH auto"]
    if config.s3_region:
        options.append(f"REGION {quote(config.s3_region)}")
    if config.s3_endpoint:
        scheme, _, host = config.s3_endpoint.rpartition("://")
        options.append(f"ENDPOINT {quote(host)}")
        options.append(f"USE_SSL {'false' if scheme == 'http' else 'true'}")
        options.append("URL_STYLE 'path'")
    connection.execute(f"CREATE OR REPLACE SECRET catalog_lake ({', '.join(options)})")
    # The extension copies the keys into settings too, where SQL could read them.
    for name in ("s3_access_key_id", "s3_secret_access_key", "s3_session_token"):
        connection.execute(f"SET GLOBAL {name} = ''")


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise InvalidRequestError.of_field("lake.data_path", f"{path}: {err.strerror}") from err


def _call(connection: duckdb.DuckDBPyConnection, function: str) -> int:
    """Call a function that changes the lake; return how many rows it returned.

    A query that only counts the rows would not run it.
    """
    rows: Any = connection.execute(f"CALL {function}").to_arrow_table()
    return int(rows.num_rows)
