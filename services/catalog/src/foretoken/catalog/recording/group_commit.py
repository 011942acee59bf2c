"""Group commit: what several streams have ready is stored in one transaction.

A commit waits for the disk, and a statement costs as much for a thousand rows as for ten. So
whoever comes to write takes along what others have queued meanwhile.
"""

import copy
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from foretoken.catalog.recording.batch_writer import BatchWriter, Memory, Outcome
from foretoken.catalog.recording.intake import GROUP_ROWS, CheckedGroup
from foretoken.catalog.storage.store import Store
from foretoken.domain.errors import CatalogBusyError
from foretoken.domain.measurements.measurement import Run


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
