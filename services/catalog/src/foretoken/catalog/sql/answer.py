"""The answer to one question in SQL, taken from a process that ends with it if need be."""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping

import duckdb
import pyarrow as pa

from foretoken.catalog.sql.frame import Kind, Question, limit_error
from foretoken.catalog.sql.process import SqlProcess, SqlProcesses
from foretoken.catalog.storage.error import translate
from foretoken.catalog.storage.store import Store
from foretoken.domain.errors import (
    CatalogBusyError,
    ForetokenError,
    InvalidRequestError,
    QueryLimitError,
    ServiceUnavailableError,
)


class Answer:
    """Rows of one question, computed as they are taken, until they or the limits end.

    Any thread may end it. Its process is then ended too, unless that had given the whole answer.
    """

    def __init__(
        self, store: Store, processes: SqlProcesses, on_over: Callable[[str], None]
    ) -> None:
        """Keep what it needs; `on_over` is called with the limit that ended it, or nothing."""
        self._store = store
        self._processes = processes
        self._on_over = on_over
        self._lock = threading.Lock()
        self._is_over = False
        self._error: ForetokenError | None = None
        self._timer: threading.Timer | None = None
        self._process: SqlProcess | None = None
        self._steady = contextlib.ExitStack()

    def start(self, text: str, num_wanted: int, timeout_s: float) -> pa.Schema:
        """Ask; return the columns of the answer.

        Raises:
            InvalidRequestError: it is not a question that may be asked, or DuckDB refuses it.
            QueryLimitError: it took more than it may before the first row.

        """
        process = self._processes.take()
        late = limit_error("time", f"took more than {timeout_s:g} s")
        self._timer = threading.Timer(timeout_s, self.end, (late,))
        self._timer.daemon = True
        self._timer.start()
        self._begin(process, text, num_wanted)
        _, content = self._receive()
        return pa.ipc.open_stream(pa.py_buffer(content)).schema

    def take(self) -> pa.RecordBatch | None:
        """Return the next rows, or nothing after the last.

        Raises:
            InvalidRequestError: a value cannot be computed, such as a cast of one row.
            QueryLimitError: it took more than it may.

        """
        kind, content = self._receive()
        if kind is Kind.ROWS:
            return pa.ipc.open_stream(pa.py_buffer(content)).read_next_batch()
        self._finish(None, is_large=json.loads(content)["is_large"])
        return None

    def cancel(self) -> None:
        """End it because who asked has left."""
        self.end(ServiceUnavailableError("the query ended because its caller left"))

    def close(self) -> None:
        """Give up what is not taken; harmless when it is over."""
        self.end(CatalogBusyError("the query was given up; ask again"))

    def end(self, error: ForetokenError) -> None:
        """End it and its process, from any thread, for that reason; harmless when it is over."""
        self._finish(error, is_large=True)

    def _begin(self, process: SqlProcess, text: str, num_wanted: int) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self._processes.give_back, process)
            steady = contextlib.ExitStack()
            revision = undo.enter_context(steady).enter_context(self._store.steady())
            with self._lock:
                if not self._is_over:
                    self._process, self._steady = process, steady
                    undo.pop_all()
                    process.ask(Question(text=text, num_wanted=num_wanted, revision=revision))

    def _receive(self) -> tuple[Kind, bytes]:
        """Return the next frame of columns or rows, or the end.

        Raises:
            ForetokenError: it ended otherwise.

        """
        if self._process is not None and not self._is_over:
            try:
                kind, content = self._process.receive()
                if kind not in {Kind.REFUSED, Kind.LIMIT, Kind.FAILED}:
                    return kind, content
                fields = json.loads(content)
                is_large = fields["is_large"] or fields.get("limit") == "memory"
                self._finish(self._find_error(kind, fields), is_large=is_large)
            except ForetokenError as err:
                self.end(err)
        raise self._error or CatalogBusyError("the query is over; ask again")

    def _find_error(self, kind: Kind, fields: Mapping[str, str]) -> ForetokenError:
        message = fields["message"]
        if kind is Kind.REFUSED:
            return InvalidRequestError.of_field("text", message)
        if kind is Kind.LIMIT:
            return QueryLimitError(message, limit=fields["limit"])
        if message.startswith(("INTERNAL", "FATAL")):
            return limit_error("crash", f"made DuckDB fail: {message.splitlines()[0]}")
        error: duckdb.Error = getattr(duckdb, fields["error"], duckdb.IOException)(message)
        attachment = self._store.attachment
        return attachment.explain(error) or translate(error, attachment.name)

    def _finish(self, error: ForetokenError | None, *, is_large: bool) -> None:
        """Give back all it has, once: the process for the next question, or to be replaced."""
        with self._lock:
            if self._is_over:
                return
            self._is_over, self._error = True, error
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            (self._processes.replace if is_large else self._processes.give_back)(self._process)
        self._steady.close()
        self._on_over(error.details["limit"] if isinstance(error, QueryLimitError) else "")
