"""Hand rows to the catalog as they come, a batch at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.measurements.measurement import MeasurementBatch, Run
from foretoken.domain.ports import CatalogPort
from foretoken.profiler.environment import DeviceReading
from foretoken.profiler.recording.batch_sender import BatchSender, HandOver
from foretoken.profiler.recording.spool import Row, RunSpool
from foretoken.profiler.timing.timer import TimingSummary
from foretoken.wire.arrow import rows_to_table

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
            "dims": dict(call.dims),
            "kernel": kernel,
            "variant": call.variant or None,
            "flags": [],
        }


def reading_columns(reading: DeviceReading) -> dict[str, float | str | None]:
    """Return the columns of a device reading."""
    return {
        "power_w": reading.power_w,
        "clock_mhz": reading.clock_mhz,
        "temperature_c": reading.temperature_c,
        "throttle": reading.throttle,
    }


class BatchWriter:
    """Collects rows of one run and records them, a batch at a time.

    A batch is acknowledged before the next case is timed: the catalog's own work does not disturb a
    measurement. Only a catalog that is away is not waited for. Rows are on disk from the moment
    they come until the catalog has them.
    """

    def __init__(
        self, catalog: CatalogPort, run: Run, spool: RunSpool, hand_over: HandOver
    ) -> None:
        """Record into `catalog`; `spool` must be open."""
        self._spool = spool
        self._hand_over = hand_over
        self._sender = BatchSender(catalog, run, spool, hand_over)
        self._rows: list[dict[str, Any]] = []
        self._first_row_s = 0.0
        self._next_index = 0

    def add(self, row: Row, now_s: float) -> None:
        """Take a row that was finished at `now_s`; it is sent once it is confirmed.

        Raises:
            StorageFullError: it cannot be kept.

        """
        if not self._rows:
            self._first_row_s = now_s
        self._spool.append(self._next_index, row)
        self._rows.append(dict(row))

    def confirm(self, now_s: float, drift_flags: Sequence[str] = ()) -> None:
        """Let go the rows since the last time, the timed ones with these flags.

        Raises:
            ForetokenError: the catalog refused a batch.

        """
        for row in self._rows:
            if drift_flags and row["status"] == "ok":
                row["flags"] = [*row["flags"], *drift_flags]
        is_due = now_s - self._first_row_s >= self._hand_over.batch_s
        if drift_flags or len(self._rows) >= self._hand_over.batch_rows or is_due:
            self.flush()

    def flush(self) -> None:
        """Send what there is, and wait a while for the receipt.

        Raises:
            ForetokenError: the catalog refused a batch.

        """
        if self._rows:
            self._send(is_last=False)
            self._sender.wait(self._hand_over.receipt_s)

    def finish(self, on_wait: Callable[[str], None], *, is_hasty: bool = False) -> None:
        """Send what there is as the last of the run, and wait for the catalog to have it all.

        `on_wait` is called every second with what is waited for, and may raise. In haste it waits
        no longer than for any receipt.

        Raises:
            ServiceUnavailableError: it stayed away; the rows are kept for the next start.
            ForetokenError: it refused a batch.

        """
        self._send(is_last=True)
        limits = self._hand_over
        patience_s = limits.receipt_s if is_hasty else limits.catalog_s
        if not self._sender.drain(patience_s, on_wait):
            raise ServiceUnavailableError(
                f"the catalog stayed away; {self._sender.num_rows} rows are kept in"
                f" {self._spool.path}: start the same profile again when it is back"
            )
        self._spool.finish()

    def close(self) -> None:
        """Stop sending; what the catalog has not is kept for the next start."""
        self._sender.stop()
        self._spool.close()

    @property
    def num_waiting_rows(self) -> int:
        """Rows that a catalog which is away has not yet."""
        return self._sender.num_rows

    def _send(self, *, is_last: bool) -> None:
        if self._rows:
            self._spool.seal(self._next_index, self._rows)
        table = rows_to_table(self._rows)
        self._sender.put(
            MeasurementBatch(batch_index=self._next_index, rows=table, is_last=is_last),
            len(self._rows),
        )
        self._next_index += 1
        self._rows.clear()


@contextmanager
def open_writer(
    catalog: CatalogPort, run: Run, spool_folder: Path, hand_over: HandOver
) -> Iterator[BatchWriter]:
    """Yield a writer of a run whose rows are kept under `spool_folder` until they are recorded.

    Raises:
        StorageFullError: they cannot be.

    """
    spool = RunSpool(spool_folder, run)
    spool.open()
    writer = BatchWriter(catalog, run, spool, hand_over)
    try:
        yield writer
    finally:
        writer.close()
