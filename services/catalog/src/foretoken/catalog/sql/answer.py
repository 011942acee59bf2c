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

# A process is ready within a second, on a machine with much else to do within some ten.
_START_LIMIT_S = 60.0


class Answer:
    """Rows of one question, computed as they are taken, until they or the limits end.

    Any thread may end it. Its process is then ended too, unless that had given the whole answer.
    """

    def __init__(
        self,
        store: Store,
        processes: SqlProcesses,
        on_over: Callable[[str], None],
        start_limit_s: float = _START_LIMIT_S,
    ) -> None:
        """Keep what it needs; `on_over` is called with the limit that ended it, or nothing.

        Its process may take `start_limit_s` to be ready.
        """
        self._store = store
        self._processes = processes
        self._on_over = on_over
        self._start_limit_s = start_limit_s
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
            CatalogBusyError: there was no process for it in time.

        """
        start_s = self._start_limit_s
        self._limit(start_s, CatalogBusyError(f"no process for the query in {start_s:g} s; retry"))
        process = self._take_process()
        self._limit(timeout_s, limit_error("time", f"took more than {timeout_s:g} s"))
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

    def _limit(self, limit_s: float, error: ForetokenError) -> None:
        """End it for that reason after so long, and no more for the one before."""
        timer = threading.Timer(limit_s, self.end, (error,))
        timer.daemon = True
        with self._lock:
            if self._is_over:
                return
            before, self._timer = self._timer, timer
        timer.start()
        if before is not None:
            before.cancel()

    def _take_process(self) -> SqlProcess:
        """Return a process that is ready.

        Raises:
            ForetokenError: there is none, or it was ended meanwhile.

        """
        process = self._processes.take()
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._process = process
        if is_over:
            self._processes.give_back(process)
        else:
            try:
                process.wait_until_ready()
            except ForetokenError as err:
                self.end(err)
        if self._error is not None:
            raise self._error
        return process

    def _begin(self, process: SqlProcess, text: str, num_wanted: int) -> None:
        try:
            with contextlib.ExitStack() as undo:
                revision = undo.enter_context(self._store.steady())
                with self._lock:
                    if not self._is_over:
                        self._steady = undo.pop_all()
                        question = Question(text=text, num_wanted=num_wanted, revision=revision)
                        process.ask(question)
        except ForetokenError as err:
            self._finish(err, is_large=False)
            raise

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
