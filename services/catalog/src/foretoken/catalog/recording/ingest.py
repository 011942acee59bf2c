"""Recording: streams of batches in, receipts out once they are on disk.

A commit waits for the disk, and a statement costs as much for a thousand rows as for ten. So
whoever comes to write takes along what others have queued meanwhile.
"""

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from foretoken.catalog.dataset import DATASET_TOOL
from foretoken.catalog.quality.review import Listener, RunReview, review_runs
from foretoken.catalog.quality.stored_row import find_unreviewed_runs
from foretoken.catalog.recording.batch_writer import BatchWriter, Memory, Outcome, find_receipts
from foretoken.catalog.recording.intake import (
    GROUP_ROWS,
    Arrival,
    CheckedGroup,
    GroupReader,
    check_arrivals,
)
from foretoken.catalog.storage.store import Store
from foretoken.domain.errors import CatalogBusyError, ForetokenError
from foretoken.domain.measurements.measurement import BatchReceipt, MeasurementBatch, Run, RunKind


@dataclass(eq=False, slots=True)
class _Entry:
    """A group that a thread wants to be stored."""

    run: Run
    group: CheckedGroup
    outcome: Outcome | None = None


class GroupCommit:
    """Stores groups of batches and their receipts. Safe to use from several threads."""

    def __init__(self, store: Store, clock: Callable[[], datetime]) -> None:
        """Keep the store; `clock` gives the time in UTC."""
        self._store = store
        self._clock = clock
        self._queue: deque[_Entry] = deque()
        self._leader_lock = threading.Lock()
        self._memory = Memory()

    def commit(self, run: Run, group: CheckedGroup) -> Outcome:
        """Store a group; return once its batches are on disk, or refused.

        A batch that is there already is not stored again. What is wrong with one group does not
        touch the others of its transaction.
        """
        entry = _Entry(run, group)
        self._queue.append(entry)
        while entry.outcome is None:
            with self._leader_lock:
                if entry.outcome is None:
                    self._commit_queue()
        return entry.outcome

    def _commit_queue(self) -> None:
        """Commit the groups that came first, up to a full transaction."""
        entries: list[_Entry] = []
        num_rows = 0
        while self._queue and num_rows < GROUP_ROWS:
            entries.append(self._queue.popleft())
            num_rows += entries[-1].group.rows.num_rows
        try:
            self._commit_entries(entries)
        finally:
            # Without outcome only after an interrupt: their own threads try again.
            self._queue.extendleft(entry for entry in reversed(entries) if entry.outcome is None)

    def _commit_entries(self, entries: Sequence[_Entry], num_tries: int = 2) -> None:
        memory, self._memory = self._memory, Memory()  # forgotten, should this fail
        try:
            with self._store.transaction() as cursor:
                memory = memory.recall(self._store.num_writes)
                writer = BatchWriter(cursor, memory, self._clock())
                outcomes = [writer.add(entry.run, entry.group) for entry in entries]
                self._store.note(writer.flush())
        except Exception as err:  # noqa: BLE001 - raised in the thread whose group it is about
            if len(entries) > 1:
                for entry in entries:
                    self._commit_entries([entry])
            elif isinstance(err, CatalogBusyError) and num_tries > 1:
                self._commit_entries(entries, num_tries - 1)  # another process was quicker
            else:
                entries[0].outcome = Outcome(error=copy.copy(err))
        else:
            self._memory = memory
            for entry, outcome in zip(entries, outcomes, strict=True):
                entry.outcome = outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestStatistics:
    """What was recorded. Rows and batches are new ones on disk; `num_bytes` is their Arrow data.

    `ingest_s` is the time from a batch's arrival to its receipt, once for batches stored together.
    `num_duplicates` counts batches that were there already, `rejects` those refused, by the reason
    of the error.
    """

    num_rows: int = 0
    num_bytes: int = 0
    num_batches: int = 0
    num_duplicates: int = 0
    ingest_s: float = 0.0
    rejects: Mapping[str, int] = field(default_factory=dict)


class Counters:
    """Adds up what several threads record."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self._lock = threading.Lock()
        self._total = IngestStatistics()

    def add(self, part: IngestStatistics, error: Exception | None) -> None:
        """Add what was recorded, and the batch that was refused after it, if one was."""
        with self._lock:
            total = self._total
            rejects = dict(total.rejects)
            if error is not None:
                reason = getattr(error, "reason", ForetokenError.reason)
                rejects[reason] = rejects.get(reason, 0) + 1
            self._total = IngestStatistics(
                num_rows=total.num_rows + part.num_rows,
                num_bytes=total.num_bytes + part.num_bytes,
                num_batches=total.num_batches + part.num_batches,
                num_duplicates=total.num_duplicates + part.num_duplicates,
                ingest_s=total.ingest_s + part.ingest_s,
                rejects=rejects,
            )

    def read(self) -> IngestStatistics:
        """Return the counts up to now."""
        with self._lock:
            return self._total


# The rows of a dataset were judged where they are from, with all that is known there.
_JUDGED_TOOLS = (DATASET_TOOL,)

_log = logging.getLogger(__name__)


def _review_unheard(review: Callable[[Listener], RunReview]) -> RunReview:
    return review(lambda _ratio, _message: None)


class Ingest:
    """Records the batches of runs. Safe to use from several threads, one per stream."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], datetime],
        max_batch_rows: int,
        review_import: Callable[[Callable[[Listener], RunReview]], object] = _review_unheard,
    ) -> None:
        """Keep the store; `clock` gives the UTC time, `review_import` lets reviews be watched."""
        self._store = store
        self._clock = clock
        self._max_batch_rows = max_batch_rows
        self._commits = GroupCommit(store, clock)
        self._review_import = review_import
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
                self._review([run.run_id], is_import=run.kind is RunKind.IMPORT)
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

    def _review(self, run_ids: Sequence[str], *, is_import: bool = False) -> None:
        """Judge complete runs as a whole; their rows are safe whatever comes of it."""

        def review(listener: Listener) -> RunReview:
            return review_runs(self._store, run_ids, self._clock(), listener)

        try:
            (self._review_import if is_import else _review_unheard)(review)
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
