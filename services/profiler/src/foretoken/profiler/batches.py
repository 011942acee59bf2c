"""Turn timings into rows of the measurement schema, and hand them to the catalog as they come."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from foretoken.domain.errors import CatalogBusyError, ServiceUnavailableError
from foretoken.domain.estimate import OperatorCall
from foretoken.domain.measurement import BatchReceipt, MeasurementBatch, Run
from foretoken.domain.ports import CatalogPort
from foretoken.profiler.environment import DeviceReading
from foretoken.profiler.timer import TimingSummary
from foretoken.wire.arrow import rows_to_table

Row = Mapping[str, Any]

_NUM_ATTEMPTS = 4
_LONGEST_REASON = 300


class RowBuilder:
    """Fills in what all rows of a run share."""

    def __init__(self, device: str, framework: str, framework_version: str) -> None:
        """Name the device and the software that is timed."""
        self._shared = {
            "device": device,
            "framework": framework,
            "framework_version": framework_version,
        }

    def measured(
        self, call: OperatorCall, kernel: str, summary: TimingSummary, **optional: Any
    ) -> Row:
        """Return the row of a timed call; `optional` are further columns."""
        return {
            **self._of_call(call, kernel),
            "latency_us_median": summary.latency_us_median,
            "latency_us_mean": summary.latency_us_mean,
            "latency_us_min": summary.latency_us_min,
            "latency_us_max": summary.latency_us_max,
            "latency_us_std": summary.latency_us_std,
            "latency_us_p10": summary.latency_us_p10,
            "latency_us_p90": summary.latency_us_p90,
            "num_samples": summary.num_samples,
            "status": "ok",
            **optional,
        }

    def failed(self, call: OperatorCall, kernel: str, reason: str, **optional: Any) -> Row:
        """Return the row of a call that could not be timed."""
        return {
            **self._of_call(call, kernel),
            "status": "failed",
            "status_reason": reason[:_LONGEST_REASON],
            **optional,
        }

    def _of_call(self, call: OperatorCall, kernel: str) -> dict[str, Any]:
        return {
            **self._shared,
            "operator": call.operator,
            "phase": call.phase.name.lower(),
            "dtype": call.dtype.name.lower(),
            "dims": call.dims,
            "kernel": kernel,
            "flags": [],
        }


def reading_columns(reading: DeviceReading) -> dict[str, float | None]:
    """Return the columns of a device reading."""
    return {"power_w": reading.power_w, "clock_mhz": reading.clock_mhz}


class BatchWriter:
    """Collects rows of one run and records them, a batch at a time.

    Each batch is acknowledged before the next case is timed: the catalog's own work does not
    disturb a measurement, and a kill loses only the rows since the last batch.
    """

    def __init__(
        self,
        catalog: CatalogPort,
        run: Run,
        *,
        batch_rows: int,
        batch_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Hand over after `batch_rows` rows or `batch_s` seconds, whichever comes first."""
        self._catalog = catalog
        self._run = run
        self._batch_rows = batch_rows
        self._batch_s = batch_s
        self._sleep = sleep
        self._rows: list[Row] = []
        self._first_row_s = 0.0
        self._next_index = 0

    def add(self, row: Row, now_s: float) -> None:
        """Take a row that was finished at `now_s`, and record the batch when it is due."""
        if not self._rows:
            self._first_row_s = now_s
        self._rows.append(row)
        if len(self._rows) >= self._batch_rows or now_s - self._first_row_s >= self._batch_s:
            self.flush()

    def flush(self, *, is_last: bool = False) -> None:
        """Record what is left; `is_last` completes the run.

        Raises:
            ForetokenError: the catalog refused the batch, or stayed away for several attempts.

        """
        if not self._rows and not is_last:
            return
        table = rows_to_table(self._rows)
        batch = MeasurementBatch(batch_index=self._next_index, rows=table, is_last=is_last)
        self._record(batch)
        self._next_index += 1
        self._rows.clear()

    def _record(self, batch: MeasurementBatch) -> tuple[BatchReceipt, ...]:
        # The index makes a retry harmless: a batch that did arrive is not stored again.
        for attempt in range(_NUM_ATTEMPTS - 1):
            try:
                return tuple(self._catalog.record(self._run, (batch,)))
            except (CatalogBusyError, ServiceUnavailableError):
                self._sleep(0.5 * 4.0**attempt)
        return tuple(self._catalog.record(self._run, (batch,)))
