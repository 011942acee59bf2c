"""Send batches of one run to a catalog that may be away for a while."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from foretoken.domain.errors import (
    CatalogBusyError,
    ForetokenError,
    RunConflictError,
    ServiceUnavailableError,
)
from foretoken.domain.measurements.measurement import MeasurementBatch, Run
from foretoken.domain.ports import CatalogPort
from foretoken.profiler.recording.spool import LeftRun, RunSpool

T = TypeVar("T")

_log = logging.getLogger(__name__)

# What a catalog that restarts, or is not reached for a while, answers.
AWAY = (CatalogBusyError, ServiceUnavailableError)


@dataclass(frozen=True, kw_only=True, slots=True)
class HandOver:
    """When rows go to the catalog, and how long to wait for it.

    A batch is due after `batch_rows` rows or `batch_s` seconds. Measuring waits `receipt_s` for a
    receipt, then goes on without; in the end, and before the start, `catalog_s` may pass. A catalog
    that is away is asked again after `retry_s`, and after twice as long each time up to
    `retry_s_max`.
    """

    batch_rows: int = 50
    batch_s: float = 5.0
    receipt_s: float = 5.0
    catalog_s: float = 300.0
    retry_s: float = 0.5
    retry_s_max: float = 5.0


class BatchSender:
    """Sends batches in order from a thread of its own, each again until the catalog has it."""

    def __init__(
        self, catalog: CatalogPort, run: Run, spool: RunSpool, hand_over: HandOver
    ) -> None:
        """Send to `catalog`, and tell `spool` what has arrived."""
        self._catalog, self._run, self._spool = catalog, run, spool
        self._hand_over = hand_over
        self._waiting: deque[tuple[MeasurementBatch, int]] = deque()
        self._changed = threading.Condition()
        self._is_away = False
        self._is_stopped = False
        self._error: ForetokenError | None = None
        self._thread = threading.Thread(target=self._work, name="catalog-sender", daemon=True)

    @property
    def num_rows(self) -> int:
        """Rows without a receipt."""
        with self._changed:
            return sum(num_rows for _, num_rows in self._waiting)

    def put(self, batch: MeasurementBatch, num_rows: int) -> None:
        """Queue a batch.

        Raises:
            ForetokenError: the catalog refused an earlier one.

        """
        with self._changed:
            self._raise_error()
            self._waiting.append((batch, num_rows))
            self._changed.notify_all()
        if not self._thread.is_alive():
            self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until all is sent, but not for a catalog that is away."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle() or self._is_away, timeout_s)
            self._raise_error()

    def drain(self, timeout_s: float, on_wait: Callable[[str], None]) -> bool:
        """Wait until all is sent; return whether it is.

        `on_wait` is called every second with what is waited for, and may raise.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            with self._changed:
                is_sent = self._changed.wait_for(self._is_idle, min(1.0, max(left_s, 0.0)))
                self._raise_error()
            if is_sent or left_s <= 0.0:
                return is_sent
            on_wait(f"waiting for the catalog to take {self.num_rows} rows")

    def stop(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        return not self._waiting or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        delay_s = self._hand_over.retry_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_stopped)
                if self._is_stopped:
                    return
                batch, _ = self._waiting[0]
            try:
                # The index makes a retry harmless: a batch that did arrive is not stored again.
                for _ in self._catalog.record(self._run, (batch,)):
                    pass
                self._spool.acknowledge(batch.batch_index)
            except AWAY as err:
                self._note_absence(err)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_stopped, delay_s)
                delay_s = min(2 * delay_s, self._hand_over.retry_s_max)
                continue
            except ForetokenError as err:
                with self._changed:
                    self._error = err
                    self._changed.notify_all()
                return
            delay_s = self._hand_over.retry_s
            self._note_receipt()

    def _note_absence(self, err: ForetokenError) -> None:
        with self._changed:
            if not self._is_away:
                _log.warning(
                    "the catalog is away; measuring goes on run_id=%s: %s",
                    self._run.run_id,
                    err.message,
                )
            self._is_away = True
            self._changed.notify_all()

    def _note_receipt(self) -> None:
        with self._changed:
            if self._is_away:
                _log.warning("the catalog is back run_id=%s", self._run.run_id)
            self._is_away = False
            self._waiting.popleft()
            self._changed.notify_all()


def send_left_run(catalog: CatalogPort, left: LeftRun) -> int:
    """Record what an earlier process left of a run, complete it, and return its rows.

    A batch that did arrive is acknowledged again and not stored twice.

    Raises:
        ForetokenError: whatever the catalog raises; what is left stays.

    """
    num_rows = 0
    for batch in left.batches():
        try:
            for receipt in catalog.record(left.run, (batch,)):
                num_rows += 0 if receipt.was_duplicate else receipt.num_rows
        except RunConflictError:
            # The process ended between the receipt of the last batch and forgetting the run.
            if not batch.is_last:
                raise
    left.finish()
    return num_rows


def wait_for_catalog(
    ask: Callable[[], T], hand_over: HandOver, on_wait: Callable[[str], None]
) -> T:
    """Return what `ask` does, asked again while the catalog is away.

    `on_wait` is called with the reason before each wait, and may raise.

    Raises:
        ForetokenError: whatever `ask` raises; for absence once `catalog_s` have passed.

    """
    end_s = time.monotonic() + hand_over.catalog_s
    delay_s = hand_over.retry_s
    while True:
        try:
            return ask()
        except AWAY as err:
            if time.monotonic() + delay_s > end_s:
                raise
            on_wait(f"waiting for the catalog: {err.message}")
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, hand_over.retry_s_max)
