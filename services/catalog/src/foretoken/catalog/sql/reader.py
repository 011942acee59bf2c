"""The tables as a process sees them that answers questions in SQL."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa

from foretoken.catalog.sql.policy import check_query
from foretoken.catalog.sql.rows import cut_rows
from foretoken.catalog.sql.setup import Question, Setup
from foretoken.catalog.storage.literal import quote
from foretoken.catalog.storage.lockdown import lock_down
from foretoken.catalog.storage.store import attachment_of, settings_of

_BATCH_ROWS = 100_000


class Reader:
    """A database of its own memory, which the catalog's tables are attached to for reading."""

    def __init__(self, setup: Setup) -> None:
        """Keep the setup; the first question opens the tables."""
        self._setup = setup
        self._revision = ""
        self._connection: duckdb.DuckDBPyConnection | None = None

    def ask(self, question: Question) -> Iterator[pa.RecordBatch | pa.Schema]:
        """Yield the columns, then the rows.

        Raises:
            InvalidRequestError: it is not a question `check_query` allows.
            QueryLimitError: it has more rows than it may.
            duckdb.Error, pa.ArrowException, OSError: DuckDB refuses it, or fails.

        """
        connection = self._open(question.revision)
        statement = check_query(connection, question.text, self._setup.views)
        setup = self._setup
        with self._transaction(connection):
            rows = connection.sql(statement).to_arrow_reader(_BATCH_ROWS)
            yield rows.schema
            yield from cut_rows(rows, question.num_wanted, setup.max_rows, setup.max_result_bytes)
            rows.close()

    @contextlib.contextmanager
    def _transaction(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        connection.execute("BEGIN TRANSACTION READ ONLY")
        try:
            yield
        finally:
            try:
                connection.execute("ROLLBACK")
            except duckdb.Error:
                self.close()

    def close(self) -> None:
        """Forget the tables; the next question opens them anew."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _open(self, revision: str) -> duckdb.DuckDBPyConnection:
        """Return a connection to the tables as they are since that revision."""
        if self._connection is not None and revision == self._revision:
            return self._connection
        self.close()
        setup = self._setup
        attachment = attachment_of(setup.catalog)
        connection = duckdb.connect(":memory:", config=settings_of(setup.catalog))
        connection.execute("SET enable_progress_bar = false")
        attachment.configure(connection)
        connection.execute(f"SET temp_directory = {quote(setup.spill_folder)}")
        connection.execute(f"SET max_temp_directory_size = '{setup.max_spill_bytes} bytes'")
        attachment.attach_for_reading(connection, Path(setup.spill_folder))
        connection.execute("USE store")
        lock_down(connection, (setup.spill_folder, *attachment.reachable_folders))
        self._connection, self._revision = connection, revision
        return connection
