"""A lock in PostgreSQL that lets one process of several write at a time."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import duckdb

from foretoken.catalog.storage.extension import load_extension
from foretoken.catalog.storage.literal import quote

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
