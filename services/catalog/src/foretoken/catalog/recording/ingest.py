"""Recording: streams of batches in, receipts out once they are on disk."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime

from foretoken.catalog.dataset import DATASET_TOOL
from foretoken.catalog.quality.review import review_runs
from foretoken.catalog.quality.review_row import find_unreviewed_runs
from foretoken.catalog.recording.batch_writer import Outcome, find_receipts
from foretoken.catalog.recording.counters import Counters, IngestStatistics
from foretoken.catalog.recording.group_commit import GroupCommit
from foretoken.catalog.recording.intake import Arrival, GroupReader, check_arrivals
from foretoken.catalog.storage.store import Store
from foretoken.domain.measurements.measurement import BatchReceipt, MeasurementBatch, Run

# The rows of a dataset were judged where they are from, with all that is known there.
_JUDGED_TOOLS = (DATASET_TOOL,)

_log = logging.getLogger(__name__)


class Ingest:
    """Records the batches of runs. Safe to use from several threads, one per stream."""

    def __init__(self, store: Store, clock: Callable[[], datetime], max_batch_rows: int) -> None:
        """Keep the store; `clock` gives the time in UTC."""
        self._store = store
        self._clock = clock
        self._max_batch_rows = max_batch_rows
        self._commits = GroupCommit(store, clock)
        self._counters = Counters()

    def statistics(self) -> IngestStatistics:
        """Return what was recorded up to now."""
        return self._counters.read()

    def review_missed_runs(self) -> None:
        """Review the runs that a crash, or a full disk, kept from it when they were complete."""
        with self._store.cursor() as cursor:
            run_ids = find_unreviewed_runs(cursor, _JUDGED_TOOLS)
        if run_ids:
            self._review(run_ids)

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        Of an import up to a group of batches is read before the first of them has its receipt.

        Raises:
            as `CatalogService.record`, after the receipts of the batches before.

        """
        known = find_receipts(self._store, run)
        for arrivals in GroupReader(run, batches):
            start_s = time.perf_counter()
            outcome = self._store_group(run, arrivals, known)
            self._count(arrivals, outcome, time.perf_counter() - start_s)
            if outcome.completes_run and run.tool not in _JUDGED_TOOLS:
                self._review([run.run_id])
            yield from outcome.receipts
            if outcome.error is not None:
                raise outcome.error

    def _store_group(
        self, run: Run, arrivals: Sequence[Arrival], known: dict[int, BatchReceipt]
    ) -> Outcome:
        """Return what became of a group; what is `known` to be there is not checked again."""
        new = [arrival for arrival in arrivals if arrival.batch.batch_index not in known]
        outcome = Outcome()
        if new:
            checked, error = check_arrivals(new, self._max_batch_rows)
            if checked is not None:
                outcome = self._commits.commit(run, checked)
            outcome.error = outcome.error or error
        stored = iter(outcome.receipts)
        receipts = []
        for arrival in arrivals:
            receipt = known.get(arrival.batch.batch_index) or next(stored, None)
            if receipt is None:
                break
            receipts.append(receipt)
        outcome.receipts = receipts
        return outcome

    def _review(self, run_ids: Sequence[str]) -> None:
        """Judge complete runs as a whole; their rows are safe whatever comes of it."""
        try:
            review_runs(self._store, run_ids, self._clock())
        except Exception:  # noqa: BLE001 - the rows are stored, whatever a test made of them
            _log.exception(
                "the review failed; check the catalog, or open it again run_ids=%s",
                ",".join(run_ids),
            )

    def _count(self, arrivals: Sequence[Arrival], outcome: Outcome, wall_s: float) -> None:
        is_new = [not receipt.was_duplicate for receipt in outcome.receipts]
        rows = [arrival.rows for arrival, new in zip(arrivals, is_new, strict=False) if new]
        part = IngestStatistics(
            num_rows=sum(table.num_rows for table in rows),
            num_bytes=sum(table.nbytes for table in rows),
            num_batches=len(rows),
            num_duplicates=len(is_new) - len(rows),
            ingest_s=wall_s,
        )
        self._counters.add(part, outcome.error)
