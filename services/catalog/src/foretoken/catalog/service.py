"""The catalog: records measurements and hands them out again."""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from foretoken.catalog import queries
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dims import split_by_operator
from foretoken.catalog.quality import judge
from foretoken.catalog.store import CheckedBatch, Store
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.measurement import (
    ArrowStream,
    BatchReceipt,
    Coverage,
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunSummary,
    Snapshot,
)
from foretoken.wire.arrow import check_measurement_table, read_table


def _now() -> datetime:
    return datetime.now(UTC)


class CatalogService:
    """Implements `CatalogPort` on one DuckDB file. Safe to use from several threads."""

    def __init__(self, config: CatalogConfig, clock: Callable[[], datetime] = _now) -> None:
        """Keep the configuration; `clock` gives the time in UTC."""
        self._config = config
        self._clock = clock
        self._store = Store(config)

    def open(self) -> None:
        """Open the file, or make it.

        Raises:
            CatalogBusyError: another process has it open.
            CorruptCatalogError: it cannot be read as a catalog.
            InvalidRequestError: the path cannot be a file.

        """
        self._store.open()

    def close(self) -> None:
        """Close the file; what was acknowledged is in it."""
        self._store.close()

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        Raises:
            RunConflictError: a run of this id has other content.
            InvalidRequestError: a batch is not in the measurement schema, or a row of it is not
                a measurement; the batches before it stay.
            UnknownOperatorError, UnknownDeviceError, UnknownTopologyError: a row names one.

        """
        if not run.run_id:
            raise InvalidRequestError.of_field("run_id", "must not be empty")
        self._store.check_run(run)
        for batch in batches:
            yield self._record_batch(run, batch)

    def read_measurements(self, selection: MeasurementFilter) -> ArrowStream:
        """Return the selected rows, in the order they were recorded within their runs."""
        stream: ArrowStream = queries.read_measurements(self._store, selection)
        return stream

    def describe_coverage(self) -> tuple[Coverage, ...]:
        """Return row counts per operator, device, topology, dtype and phase."""
        return queries.describe_coverage(self._store)

    def list_runs(self) -> tuple[RunSummary, ...]:
        """Return all runs, newest first."""
        return queries.list_runs(self._store)

    def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        """Return the content hash of what the filter selects."""
        return queries.describe_snapshot(self._store, selection)

    def _record_batch(self, run: Run, batch: MeasurementBatch) -> BatchReceipt:
        stored = self._store.find_receipt(run.run_id, batch.batch_index)
        if stored is not None:
            return stored
        if batch.batch_index < 0:
            raise InvalidRequestError.of_field("batch_index", "must not be negative")
        try:
            checked = self._check(batch)
        except ForetokenError as err:
            err.message = f"batch {batch.batch_index}: {err.message}"
            err.args = (err.message,)
            raise
        return self._store.insert(run, checked, self._clock())

    def _check(self, batch: MeasurementBatch) -> CheckedBatch:
        table = check_measurement_table(read_table(batch.rows))
        if table.num_rows > self._config.max_batch_rows:
            raise InvalidRequestError.of_field(
                "rows", f"{table.num_rows} are more than {self._config.max_batch_rows}; split them"
            )
        table, groups = split_by_operator(table)
        judged = judge(table, groups)
        numbers = pa.array(np.arange(table.num_rows, dtype=np.int64))
        return CheckedBatch(
            batch_index=batch.batch_index,
            rows=judged.table.add_column(0, "row_index", numbers),
            num_flagged=judged.num_flagged,
            num_failed=judged.num_failed,
            is_last=batch.is_last,
        )
