"""Count the tasks of an executor, and the time they take."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple

from foretoken.simulator.search.executor import Executor, R, S, T, check_importable, keep_going
from foretoken.simulator.statistics import SimulatorStatistics, WorkerCounts


class ObservedExecutor:
    """Implements `Executor` by another one, whose tasks are counted when they are done."""

    def __init__(self, executor: Executor, statistics: SimulatorStatistics) -> None:
        self._executor = executor
        self._statistics = statistics

    @property
    def num_workers(self) -> int:
        """Tasks that run at once."""
        return self._executor.num_workers

    @property
    def workers(self) -> WorkerCounts:
        """Workers that are there."""
        return self._executor.workers

    def run(
        self,
        function: Callable[[T, S], R],
        items: Sequence[T],
        shared: S,
        check: Callable[[], None] = keep_going,
    ) -> Iterator[tuple[int, R]]:
        """Yield the index and result of every item as it is done; as `Executor.run`."""
        check_importable(function)
        for index, timed in self._executor.run(_time, items, (function, shared), check):
            self._statistics.observe_search_task(timed.elapsed_s)
            yield index, timed.result

    def close(self) -> None:
        """Let the workers go."""
        self._executor.close()


class _Timed(NamedTuple, Generic[R]):
    """A result, and how long it took in s."""

    result: R
    elapsed_s: float


def _time(item: T, work: tuple[Callable[[T, S], R], S]) -> _Timed[R]:
    function, shared = work
    started_s = time.perf_counter()
    result = function(item, shared)
    return _Timed(result, time.perf_counter() - started_s)
