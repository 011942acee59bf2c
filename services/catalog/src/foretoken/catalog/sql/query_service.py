"""Questions in SQL: answered by other processes, within limits, while recording goes on."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.sql.answer import Answer
from foretoken.catalog.sql.frame import Setup
from foretoken.catalog.sql.process import SqlProcesses, delete_leftovers
from foretoken.catalog.storage.literal import quote
from foretoken.catalog.storage.schema import describe_views
from foretoken.catalog.storage.store import Store
from foretoken.domain.caller import Allowance, current_caller
from foretoken.domain.errors import (
    CatalogBusyError,
    InvalidRequestError,
    QueueFullError,
    ServiceUnavailableError,
)
from foretoken.domain.measurements.measurement import SqlQuery

_MAX_TEXT_CHARS = 65_536
_HOUR_S = 3_600.0
# Of the database's memory, for one question, where the configuration does not say.
_MEMORY_RATIO = 0.1
# DuckDB answers nothing in less.
_MIN_MEMORY_BYTES = 128 * 2**20

# Calls a function when the caller has left; false: it has left already.
OnLeave = Callable[[Callable[[], None]], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class SqlStatistics:
    """Questions that run now, that were asked, and that a limit ended: `time`, `memory`, ..."""

    num_running: int = 0
    num_asked: int = 0
    limits_hit: Mapping[str, int] = field(default_factory=dict)


class SqlQueryService:
    """Answers questions in SQL. Safe to use from several threads."""

    def __init__(self, store: Store, config: CatalogConfig) -> None:
        """Keep the store and the limits."""
        self._store = store
        self._config = config
        self._lock = threading.Lock()
        self._statistics = SqlStatistics()
        self._answers: set[Answer] = set()
        self._processes: SqlProcesses | None = None
        self._allowance = Allowance(config.sql_s_per_caller, _HOUR_S, "seconds of SQL an hour")

    def open(self) -> None:
        """Be ready for questions; the first starts a process.

        Raises:
            InvalidRequestError: the limit of memory is no amount of memory.

        """
        config, folder = self._config, self._store.scratch_folder
        delete_leftovers(folder)
        setup = Setup(
            path=config.path,
            lake=config.lake,
            views=describe_views(),
            num_threads=config.num_threads,
            memory_bytes=self._find_memory_bytes(),
            spill_folder="",
            max_spill_bytes=config.sql_max_disk_bytes // config.sql_max_running,
            max_rows=config.sql_max_rows,
            max_result_bytes=config.sql_max_result_bytes,
        )
        self._processes = SqlProcesses(setup, folder)

    def close(self) -> None:
        """End the questions that are being answered, and the processes."""
        with self._lock:
            processes, self._processes = self._processes, None
            answers = tuple(self._answers)
        name = self._store.attachment.name
        for answer in answers:
            answer.end(
                CatalogBusyError(
                    f"the catalog {name} was closed while it was read; open it and ask again"
                )
            )
        if processes is not None:
            processes.close()

    def statistics(self) -> SqlStatistics:
        """Return what was asked up to now."""
        return self._statistics

    def ask(self, query: SqlQuery, on_leave: OnLeave | None = None) -> pa.RecordBatchReader:
        """Return the answer, computed as it is read; a reader that is let go ends it.

        A caller that leaves ends it too, where `on_leave` tells of that.

        Raises:
            InvalidRequestError: it is no question about measurements.
            QueryLimitError: it took more than it may; also while the answer is read.
            QueueFullError: too many questions are being answered.
            QuotaError: the caller's questions have taken as long as they may.

        """
        self._allowance.check(current_caller())
        if not query.timeout_s >= 0:
            raise InvalidRequestError.of_field("timeout_s", "must not be negative")
        if query.max_num_rows < 0:
            raise InvalidRequestError.of_field("max_num_rows", "must not be negative")
        if len(query.text) > _MAX_TEXT_CHARS:
            raise InvalidRequestError.of_field(
                "text", f"is longer than {_MAX_TEXT_CHARS} characters"
            )
        answer = self._enter()
        rows = self._answer(answer, query, on_leave)
        schema: pa.Schema = next(rows)  # sends the query, so that errors come from this call
        return pa.RecordBatchReader.from_batches(schema, rows)

    def _answer(self, answer: Answer, query: SqlQuery, on_leave: OnLeave | None) -> Iterator[Any]:
        """Yield the columns once the first rows are there, then the rows."""
        limit_s = self._config.sql_timeout_s
        caller, started_s = current_caller(), time.monotonic()
        try:
            if on_leave is not None and not on_leave(answer.cancel):
                raise ServiceUnavailableError("the caller left before its query was asked")
            timeout_s = min(query.timeout_s or limit_s, limit_s)
            schema = answer.start(query.text, query.max_num_rows, timeout_s)
            rows = answer.take()
            yield schema
            while rows is not None:
                yield rows
                rows = answer.take()
        finally:
            answer.close()
            self._allowance.spend(caller, time.monotonic() - started_s)

    def _enter(self) -> Answer:
        with self._lock:
            present = self._statistics
            if self._processes is None:
                name = self._store.attachment.name
                raise CatalogBusyError(f"the catalog {name} is not open")
            if present.num_running >= self._config.sql_max_running:
                raise QueueFullError(
                    f"{present.num_running} queries are being answered; try again later"
                )
            answer = Answer(self._store, self._processes, lambda limit: self._leave(answer, limit))
            self._answers.add(answer)
            self._statistics = dataclasses.replace(
                present, num_running=present.num_running + 1, num_asked=present.num_asked + 1
            )
        return answer

    def _leave(self, answer: Answer, ended_by: str) -> None:
        with self._lock:
            self._answers.discard(answer)
            present = self._statistics
            hits = dict(present.limits_hit)
            if ended_by:
                hits[ended_by] = hits.get(ended_by, 0) + 1
            self._statistics = dataclasses.replace(
                present, num_running=present.num_running - 1, limits_hit=hits
            )

    def _find_memory_bytes(self) -> int:
        """Return what DuckDB may use for one question."""
        limit = self._config.sql_memory_limit
        amount = quote(limit) if limit else "current_setting('memory_limit')"
        with self._store.cursor() as cursor:
            ((num_bytes,),) = cursor.execute(
                f"SELECT parse_formatted_bytes({amount})::BIGINT"
            ).fetchall()
        return max(_MIN_MEMORY_BYTES, int(num_bytes if limit else _MEMORY_RATIO * num_bytes))
