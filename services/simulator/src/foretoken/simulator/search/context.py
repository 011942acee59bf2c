"""What a search is given to work with: workers, progress, and a place for what it found."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol, Self

from foretoken.domain import schema
from foretoken.domain.requests.search import Finalist
from foretoken.domain.requests.training_search import StrategyFinalist
from foretoken.jobs.executor import Executor, R, S, T
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.jobs.executors.observed import ObservedExecutor
from foretoken.jobs.runner import JobProgress
from foretoken.simulator.search.journal import Journal, run_journaled
from foretoken.simulator.statistics import SimulatorStatistics

_log = logging.getLogger(__name__)

# What a search's job keeps with its result: finalists as they are found, and finished items.
FINALISTS = "finalists"
_JOURNAL = "journal"

# What a search shows as it finds it: a deployment or a strategy that was simulated.
Found = Finalist | StrategyFinalist


class SearchContext(Protocol):
    """What a search may do besides computing."""

    @property
    def num_workers(self) -> int:
        """Tasks that `run` does at once."""

    @property
    def worker_cpu_s(self) -> float:
        """CPU time that other processes have spent for what `run` did."""

    def run(
        self, function: Callable[[T, S], R], items: Sequence[T], shared: S
    ) -> Iterator[tuple[int, R]]:
        """Yield the index and result of every item as it is done; what and how as `Executor.run`.

        What an earlier process did of the same job is not done again. Items and `shared` are plain
        data, dataclasses and arrays.

        Raises:
            CancelledJobError: the job was cancelled; let it pass.
            ForetokenError: whatever the function raises.

        """

    def update(self, ratio: float, message: str = "") -> None:
        """Publish progress between 0 and 1.

        Raises:
            CancelledJobError: the job was cancelled; let it pass.

        """

    def publish(self, finalist: Found) -> None:
        """Show a finalist to whoever watches; once for each candidate, also after a restart."""


class _Workers:
    """What does the tasks of a search, and is counted."""

    def __init__(self, executor: Executor, statistics: SimulatorStatistics) -> None:
        self._executor = ObservedExecutor(executor, statistics.observe_search_task)

    @property
    def num_workers(self) -> int:
        """Tasks that `run` does at once."""
        return self._executor.num_workers

    @property
    def worker_cpu_s(self) -> float:
        """CPU time that other processes have spent for what `run` did."""
        return self._executor.worker_cpu_s


class JobContext(_Workers):
    """`SearchContext` of a job, whose finished items survive the process; a context manager.

    It logs how many items were kept from before and how many were done now.
    """

    def __init__(
        self,
        executor: Executor,
        progress: JobProgress,
        statistics: SimulatorStatistics | None = None,
    ) -> None:
        """Take workers, a job, and what counts what they do."""
        self._statistics = statistics or SimulatorStatistics()
        super().__init__(executor, self._statistics)
        self._progress = progress
        self._journal = Journal(progress.kept_path(_JOURNAL))
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        """Open the journal of the job."""
        self._closing.enter_context(self._journal)
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        found, total = self._journal.num_found, len(self._journal)
        _log.info(
            "search items job_id=%s kept=%d done=%d", self._progress.job_id, found, total - found
        )
        self._closing.close()

    def run(
        self, function: Callable[[T, S], R], items: Sequence[T], shared: S
    ) -> Iterator[tuple[int, R]]:
        """Yield the index and result of every item; see the protocol."""
        check, num_read = self._progress.check, self._journal.num_read
        found = run_journaled(self._executor, self._journal, function, items, shared, check)
        for index, result in found:
            self._statistics.observe_kept(self._journal.num_read - num_read)
            num_read = self._journal.num_read
            yield index, result

    def update(self, ratio: float, message: str = "") -> None:
        """Publish progress between 0 and 1."""
        self._progress.update(ratio, message)

    def publish(self, finalist: Found) -> None:
        """Show a finalist to whoever watches."""
        self._progress.publish(FINALISTS, str(finalist.candidate), schema.encode(finalist))


class InlineContext(_Workers):
    """`SearchContext` that works in this thread and keeps nothing: for tests and warm-ups.

    `finalists` are those published, `progress` the ratios and messages.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        super().__init__(executor or InlineExecutor(), SimulatorStatistics())
        self.finalists: list[Found] = []
        self.progress: list[tuple[float, str]] = []

    def run(
        self, function: Callable[[T, S], R], items: Sequence[T], shared: S
    ) -> Iterator[tuple[int, R]]:
        """Yield the index and result of every item."""
        return self._executor.run(function, items, shared)

    def update(self, ratio: float, message: str = "") -> None:
        """Keep how far it is."""
        self.progress.append((ratio, message))

    def publish(self, finalist: Found) -> None:
        """Keep a finalist, once for each candidate."""
        if all(known.candidate != finalist.candidate for known in self.finalists):
            self.finalists.append(finalist)
