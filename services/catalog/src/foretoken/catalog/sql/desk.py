"""Questions in SQL: answered within limits of time, memory and rows, while recording goes on."""

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from foretoken.catalog.sql.answer import Answer, AnswerLimits
from foretoken.catalog.storage.public_views import describe_views
from foretoken.catalog.storage.store import Store
from foretoken.domain.errors import InvalidRequestError, QueryLimitError, QueueFullError
from foretoken.domain.measurement import SqlQuery


@dataclass(frozen=True, kw_only=True, slots=True)
class SqlLimits:
    """How many rows, seconds and bytes of disk a question may take, and how many run at a time."""

    max_rows: int
    timeout_s: float
    max_spill_bytes: int
    max_running: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SqlStatistics:
    """Questions that run now, that were asked, and that a limit ended: time, memory or rows."""

    num_running: int = 0
    num_asked: int = 0
    limits_hit: Mapping[str, int] = field(default_factory=dict)


class SqlDesk:
    """Answers questions in SQL. Safe to use from several threads."""

    def __init__(self, store: Store, limits: SqlLimits) -> None:
        """Keep the store and the limits."""
        self._store = store
        self._limits = limits
        self._lock = threading.Lock()
        self._statistics = SqlStatistics()

    def statistics(self) -> SqlStatistics:
        """Return what was asked up to now."""
        return self._statistics

    def ask(self, query: SqlQuery) -> pa.RecordBatchReader:
        """Return the answer, computed as it is read; a reader that is let go ends it.

        Raises:
            InvalidRequestError: it is no question about measurements.
            QueryLimitError: it took more than it may; also while the answer is read.
            QueueFullError: too many questions are being answered.

        """
        if not query.timeout_s >= 0:
            raise InvalidRequestError.of_field("timeout_s", "must not be negative")
        if query.max_num_rows < 0:
            raise InvalidRequestError.of_field("max_num_rows", "must not be negative")
        self._enter()
        rows = self._answer(query)
        schema: pa.Schema = next(rows)  # asks, so that errors come from this call
        return pa.RecordBatchReader.from_batches(schema, rows)

    def _answer(self, query: SqlQuery) -> Iterator[Any]:
        """Yield the columns once the first rows are there, then the rows."""
        limits, ended_by = self._limits, ""
        answer = Answer(
            self._store,
            AnswerLimits(
                timeout_s=min(query.timeout_s or limits.timeout_s, limits.timeout_s),
                max_spill_bytes=limits.max_spill_bytes,
            ),
        )
        try:
            schema = answer.start(query.text, describe_views())
            first = answer.take()
            yield schema
            yield from _cut(first, answer, query.max_num_rows, limits.max_rows)
        except QueryLimitError as err:
            ended_by = err.details["limit"]
            raise
        finally:
            answer.close()
            self._leave(ended_by)

    def _enter(self) -> None:
        with self._lock:
            present = self._statistics
            if present.num_running >= self._limits.max_running:
                raise QueueFullError(
                    f"{present.num_running} queries are being answered; try again later"
                )
            self._statistics = dataclasses.replace(
                present, num_running=present.num_running + 1, num_asked=present.num_asked + 1
            )

    def _leave(self, ended_by: str) -> None:
        with self._lock:
            present = self._statistics
            hits = dict(present.limits_hit)
            if ended_by:
                hits[ended_by] = hits.get(ended_by, 0) + 1
            self._statistics = dataclasses.replace(
                present, num_running=present.num_running - 1, limits_hit=hits
            )


def _cut(
    first: pa.RecordBatch | None, answer: Answer, num_wanted: int, max_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield rows up to those wanted (0: all).

    Raises:
        QueryLimitError: more are wanted and there than may be sent.

    """
    num_left, rows = max_rows, first
    while rows is not None:
        if num_wanted:
            rows = rows.slice(0, num_wanted - (max_rows - num_left))
        num_left -= rows.num_rows
        if num_left < 0:
            raise QueryLimitError(
                f"the result has more than {max_rows} rows; narrow it, or ask for fewer",
                limit="rows",
            )
        yield rows
        is_enough = max_rows - num_left == num_wanted
        rows = None if is_enough and num_wanted else answer.take()
