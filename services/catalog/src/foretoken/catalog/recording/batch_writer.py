"""Write batches, each once: their rows, their receipts, and the runs they are of."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from foretoken.catalog.recording.intake import CheckedBatch, CheckedGroup
from foretoken.catalog.storage.commit import Recorded
from foretoken.catalog.storage.store import Store, next_moment
from foretoken.domain.errors import RunConflictError
from foretoken.domain.measurements.measurement import BatchReceipt, Run


@dataclass(slots=True)
class RunState:
    """What the catalog has of a run; `last_index` is the batch that ends it, once that is there."""

    content_hash: str
    num_batches: int = 0
    max_index: int = -1
    last_index: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the last batch and all before it are there."""
        return self.last_index is not None and self.num_batches == self.last_index + 1

    def check(self, run: Run) -> None:
        """Check that a run is the one that was stored under its id.

        Raises:
            RunConflictError: it is not.

        """
        if run.content_hash != self.content_hash:
            raise RunConflictError(
                f"run {run.run_id} was recorded with other content; give this one another id",
                run_id=run.run_id,
            )

    def add(self, run: Run, batch: CheckedBatch) -> None:
        """Note a new batch.

        Raises:
            RunConflictError: the run has ended before it.

        """
        if self.last_index is not None and batch.batch_index > self.last_index:
            raise RunConflictError(
                f"run {run.run_id} ended with batch {self.last_index}: "
                f"batch {batch.batch_index} is too late",
                run_id=run.run_id,
            )
        if batch.is_last and batch.batch_index < self.max_index:
            raise RunConflictError(
                f"run {run.run_id} has batch {self.max_index} already: "
                f"batch {batch.batch_index} cannot be its last",
                run_id=run.run_id,
            )
        if batch.is_last:
            self.last_index = batch.batch_index
        self.num_batches += 1
        self.max_index = max(self.max_index, batch.batch_index)


def read_run_state(cursor: duckdb.DuckDBPyConnection, run_id: str) -> RunState | None:
    """Return what is there of a run, None if nothing."""
    rows = cursor.execute(
        "SELECT content_hash, count(batch_index), coalesce(max(batch_index), -1),"
        " max(batch_index) FILTER (is_last)"
        " FROM run LEFT JOIN batch USING (run_id) WHERE run_id = ? GROUP BY content_hash",
        [run_id],
    ).fetchall()
    return RunState(*rows[0]) if rows else None


def insert_run(cursor: duckdb.DuckDBPyConnection, run: Run, started: datetime) -> None:
    """Write a run that is not there; `started` is in UTC, without a zone."""
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


_BATCH_SCHEMA = pa.schema(
    [
        pa.field("batch_number", pa.int64()),
        pa.field("run_id", pa.string()),
        pa.field("batch_index", pa.int64()),
        pa.field("num_rows", pa.int64()),
        pa.field("num_flagged", pa.int64()),
        pa.field("num_failed", pa.int64()),
        pa.field("is_last", pa.bool_()),
        pa.field("recorded_at", pa.timestamp("us")),
    ]
)
_MAX_RUNS_REMEMBERED = 1000


@dataclass(slots=True)
class Outcome:
    """What became of a group: receipts of its first batches, and the error of the next if any.

    `completes_run`: with this group, all batches of the run are there.
    """

    receipts: list[BatchReceipt] = field(default_factory=list)
    error: Exception | None = None
    completes_run: bool = False


@dataclass(slots=True)
class Memory:
    """What the last transaction knew of the tables. It holds until somebody else writes."""

    num_writes: int = -1
    next_number: int | None = None
    runs: dict[str, RunState] = field(default_factory=dict)

    def recall(self, num_writes: int) -> "Memory":
        """Return what still holds after that many writes, for one transaction to go on with."""
        holds = num_writes == self.num_writes and len(self.runs) < _MAX_RUNS_REMEMBERED
        return Memory(
            num_writes + 1, self.next_number if holds else None, self.runs if holds else {}
        )


class BatchWriter:
    """One transaction: decides batch by batch what is new, then writes it with few statements."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection, memory: Memory, now: datetime) -> None:
        """Keep the cursor, in a transaction, and what is known of the tables; `now` is in UTC."""
        self._cursor = cursor
        self._memory = memory
        self._now = now.replace(tzinfo=None)
        self._batches: list[tuple[str, CheckedBatch]] = []
        self._tables: list[pa.Table] = []

    def add(self, run: Run, group: CheckedGroup) -> Outcome:
        """Return what becomes of a group; what is new of it is written by `flush`."""
        outcome = Outcome()
        places: list[int] = []
        state = self._state_of(run)
        try:
            state.check(run)
            stored = self._find_stored(run, state, group)
            for place, batch in enumerate(group.batches):
                receipt = stored.get(batch.batch_index)
                if receipt is None:
                    state.add(run, batch)
                    receipt = _receipt_of(run.run_id, batch)
                    stored[batch.batch_index] = replace(receipt, was_duplicate=True)
                    places.append(place)
                outcome.receipts.append(receipt)
        except RunConflictError as err:
            outcome.error = err
        if places:
            self._batches += [(run.run_id, group.batches[place]) for place in places]
            self._tables.append(group.select(places))
            outcome.completes_run = state.is_complete
        return outcome

    def flush(self) -> Recorded:
        """Write the rows and receipts of all that is new; return how much that is."""
        if not self._batches:
            return Recorded()
        first = self._memory.next_number
        if first is None:
            first = next_moment(self._cursor)
        self._memory.next_number = first + len(self._batches)
        numbers = list(range(first, self._memory.next_number))
        self._insert("INSERT INTO batch SELECT * FROM incoming", self._receipts_table(numbers))
        rows = pa.concat_tables(self._tables)
        if rows.num_rows:
            sizes = [batch.num_rows for _, batch in self._batches]
            rows = rows.append_column("batch_number", pa.array(np.repeat(numbers, sizes)))
            # In one piece: DuckDB takes up each for itself.
            self._insert(
                "INSERT INTO measurement BY NAME SELECT * FROM incoming", rows.combine_chunks()
            )
        run_id, newest = self._batches[-1]
        return Recorded(
            num_batches=len(self._batches),
            num_rows=rows.num_rows,
            newest_batch=f"batch {newest.batch_index} of run {run_id}",
            recorded_at=f"{self._now:%Y-%m-%dT%H:%M:%SZ}",
        )

    def _state_of(self, run: Run) -> RunState:
        state = self._memory.runs.get(run.run_id)
        if state is None:
            state = read_run_state(self._cursor, run.run_id)
            if state is None:
                state = RunState(run.content_hash)
                insert_run(self._cursor, run, self._now)
            self._memory.runs[run.run_id] = state
        return state

    def _find_stored(
        self, run: Run, state: RunState, group: CheckedGroup
    ) -> dict[int, BatchReceipt]:
        """Return the receipts of those batches of the group that are there already."""
        indices = [
            batch.batch_index for batch in group.batches if batch.batch_index <= state.max_index
        ]
        stored = read_receipts(self._cursor, run.run_id, indices)
        stored |= {
            batch.batch_index: replace(_receipt_of(run_id, batch), was_duplicate=True)
            for run_id, batch in self._batches
            if run_id == run.run_id
        }
        return stored

    def _receipts_table(self, numbers: list[int]) -> pa.Table:
        batches = [batch for _, batch in self._batches]
        columns: dict[str, list[Any]] = {
            "batch_number": numbers,
            "run_id": [run_id for run_id, _ in self._batches],
            "recorded_at": [self._now] * len(batches),
        }
        for name in ("batch_index", "num_rows", "num_flagged", "num_failed", "is_last"):
            columns[name] = [getattr(batch, name) for batch in batches]
        return pa.table(columns, schema=_BATCH_SCHEMA)

    def _insert(self, statement: str, rows: pa.Table) -> None:
        self._cursor.register("incoming", rows)
        self._cursor.execute(statement)
        self._cursor.unregister("incoming")


def find_receipts(store: Store, run: Run) -> dict[int, BatchReceipt]:
    """Return the receipts of the run's batches that are there, by batch index.

    Raises:
        RunConflictError: a run of this id has other content.

    """
    with store.cursor() as cursor:
        state = read_run_state(cursor, run.run_id)
        if state is None:
            return {}
        state.check(run)
        return read_receipts(cursor, run.run_id)


def read_receipts(
    cursor: duckdb.DuckDBPyConnection, run_id: str, indices: Sequence[int] | None = None
) -> dict[int, BatchReceipt]:
    """Return the receipts of a run that are there, of these batches or all, by batch index."""
    if indices is not None and not indices:
        return {}
    condition = "run_id = ?"
    values: list[str | int] = [run_id]
    if indices is not None:
        condition += " AND batch_index BETWEEN ? AND ?"
        values += [min(indices), max(indices)]
    rows = cursor.execute(
        f"SELECT batch_index, num_rows, num_flagged FROM batch WHERE {condition}",  # noqa: S608 - values are bound
        values,
    ).fetchall()
    return {
        batch_index: BatchReceipt(
            run_id=run_id,
            batch_index=batch_index,
            num_rows=num_rows,
            num_flagged=num_flagged,
            was_duplicate=True,
        )
        for batch_index, num_rows, num_flagged in rows
    }


def _receipt_of(run_id: str, batch: CheckedBatch) -> BatchReceipt:
    return BatchReceipt(
        run_id=run_id,
        batch_index=batch.batch_index,
        num_rows=batch.num_rows,
        num_flagged=batch.num_flagged,
    )
