"""The answer to one question in SQL, watched while it is computed and read."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from foretoken.catalog.sql.policy import check_query
from foretoken.catalog.storage.error import translate
from foretoken.catalog.storage.lockdown import limit_cursor_memory
from foretoken.catalog.storage.store import Store
from foretoken.domain.errors import ForetokenError, InvalidRequestError, QueryLimitError

_BATCH_ROWS = 10_000
_TICK_S = 0.05
# Of the database's memory, for all questions together: the rest is for recording.
_MEMORY_RATIO = 0.4
# Memory that cannot give way to others, as what can be put on disk does; and what was put there.
_GAUGE = """
    SELECT
        sum(memory_usage_bytes) FILTER (tag = 'ALLOCATOR')::BIGINT,
        sum(temporary_storage_bytes)::BIGINT
    FROM duckdb_memory()
"""
_MEMORY_LIMIT = "SELECT parse_formatted_bytes(current_setting('memory_limit'))::BIGINT"
# What DuckDB's errors begin with when the catalog is at fault, and not the question.
_OUR_FAULT = re.compile(r"(IO|INTERNAL|FATAL|Serialization|Interrupt|INTERRUPT|HTTP) Error")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerLimits:
    """What one answer may take: seconds from question to last row, and bytes of disk."""

    timeout_s: float
    max_spill_bytes: int


class Answer:
    """Rows of one question, computed as they are taken, until they or the limits end.

    A thread of its own watches the limits, and gives up the cursor of one that nobody takes.
    """

    def __init__(self, store: Store, limits: AnswerLimits) -> None:
        """Keep the store and the limits; `start` asks."""
        self._store = store
        self._limits = limits
        self._stack = contextlib.ExitStack()
        self._turn = threading.Lock()  # held by whoever is inside the database, or closes it
        self._is_over = threading.Event()
        self._excess: QueryLimitError | None = None
        self._watcher: threading.Thread | None = None
        self._cursor: duckdb.DuckDBPyConnection
        self._rows: pa.RecordBatchReader

    def start(self, text: str, views: Mapping[str, str]) -> pa.Schema:
        """Ask; return the columns of the answer.

        Raises:
            InvalidRequestError: it is not a question `check_query` allows, or DuckDB refuses it.
            QueryLimitError: it took more than it may before the first row.

        """
        with self._turn, self._explained():
            self._cursor = self._stack.enter_context(self._store.cursor())
            ((memory_bytes,),) = self._cursor.execute(_MEMORY_LIMIT).fetchall()
            limit_bytes = int(memory_bytes * _MEMORY_RATIO)
            limit_cursor_memory(self._cursor, limit_bytes)
            self._watcher = threading.Thread(target=self._watch, args=(limit_bytes,), daemon=True)
            self._watcher.start()
            statement = check_query(self._cursor, text, views)
            self._cursor.execute("BEGIN TRANSACTION READ ONLY")
            self._rows = self._cursor.sql(statement).to_arrow_reader(_BATCH_ROWS)
            schema: pa.Schema = self._rows.schema
        return schema

    def take(self) -> pa.RecordBatch | None:
        """Return the next rows, or nothing after the last.

        Raises:
            InvalidRequestError: a value cannot be computed, such as a cast of one row.
            QueryLimitError: it took more than it may.

        """
        with self._turn, self._explained():
            if self._excess is not None:
                raise self._excess
            return next(self._rows, None)

    def close(self) -> None:
        """Give up what is not taken; harmless when it is over."""
        with self._turn:
            self._release()
        if self._watcher is not None:
            self._watcher.join()

    def _release(self) -> None:
        self._is_over.set()
        self._stack.close()

    def _watch(self, limit_bytes: int) -> None:
        end_s = time.monotonic() + self._limits.timeout_s
        while not self._is_over.wait(_TICK_S):
            if time.monotonic() > end_s:
                self._stop("time", f"took more than {self._limits.timeout_s:g} s")
            elif excess := self._find_memory_excess(limit_bytes):
                self._stop("memory", excess)

    def _find_memory_excess(self, limit_bytes: int) -> str:
        try:
            with self._store.cursor() as gauge:
                ((memory_bytes, spill_bytes),) = gauge.execute(_GAUGE).fetchall()
        except ForetokenError as err:
            return f"could not be watched: {err.message}"
        if memory_bytes > limit_bytes:
            return f"and others took more than {limit_bytes >> 20} MiB of memory"
        if spill_bytes > self._limits.max_spill_bytes:
            return f"and others took more than {self._limits.max_spill_bytes >> 20} MiB of disk"
        return ""

    def _stop(self, limit: str, reason: str) -> None:
        """End the answer, from whatever it is at."""
        self._excess = QueryLimitError(f"the query {reason}; narrow it", limit=limit)
        # Again and again: DuckDB forgets an interrupt that comes between two statements.
        while not self._turn.acquire(timeout=_TICK_S):
            try:
                self._cursor.interrupt()
            except duckdb.ConnectionException:
                return  # the catalog is being closed, and has ended it
        try:
            self._release()
        finally:
            self._turn.release()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what an error of DuckDB, or of the Arrow stream it comes through, means."""
        try:
            yield
        except (duckdb.Error, OSError, pa.ArrowException) as err:
            if self._excess is not None:
                raise self._excess from err
            text = str(err)
            if text.startswith("Out of Memory"):
                message = f"the query needs more memory than there is: {text.splitlines()[0]}"
                raise QueryLimitError(message, limit="memory") from err
            if _OUR_FAULT.match(text):
                error = err if isinstance(err, duckdb.Error) else duckdb.IOException(text)
                raise translate(error, self._store.attachment.name) from err
            raise InvalidRequestError.of_field("text", text) from err
