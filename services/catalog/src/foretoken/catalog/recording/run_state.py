"""What the catalog has of a run, and which of its batches may still come."""

from dataclasses import dataclass
from datetime import datetime

import duckdb

from foretoken.catalog.recording.intake import CheckedBatch
from foretoken.domain.errors import RunConflictError
from foretoken.domain.measurements.measurement import Run


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
