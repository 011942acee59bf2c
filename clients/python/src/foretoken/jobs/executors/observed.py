"""Count the tasks of an executor, and the time they take."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple

from foretoken.jobs.executor import (
    Executor,
    R,
    S,
    T,
    WorkerCounts,
    check_importable,
    keep_going,
)

# Another one in every process, on whatever machine.
_PROCESS = uuid.uuid4().int


class ObservedExecutor:
    """Implements `Executor` by another one, whose tasks are counted when they are done.

    `observe` is called with the seconds of each, if given. `worker_cpu_s` is the CPU time that
    other processes have spent for them.
    """

    def __init__(self, executor: Executor, observe: Callable[[float], None] | None = None) -> None:
        self._executor = executor
        self._observe = observe
        self.worker_cpu_s = 0.0

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
            if self._observe is not None:
                self._observe(timed.elapsed_s)
            # That of tasks in this process is in its own.
            if timed.process != _PROCESS:
                self.worker_cpu_s += timed.cpu_s
            yield index, timed.result

    def close(self) -> None:
        """Let the workers go."""
        self._executor.close()


class _Timed(NamedTuple, Generic[R]):
    """A result, how long it took in s, and what the process spent since its last result."""

    result: R
    elapsed_s: float
    cpu_s: float
    process: int


class _CpuMeter:
    """The CPU time of this process since the meter was last read, or since the process began.

    So what a worker spends to start, to import and to compile is in its tasks' time.
    """

    def __init__(self) -> None:
        self._read_s = 0.0

    def read(self) -> float:
        """Return it in s, and begin anew."""
        before_s, self._read_s = self._read_s, time.process_time()
        return self._read_s - before_s


_meter = _CpuMeter()


def _time(item: T, work: tuple[Callable[[T, S], R], S]) -> _Timed[R]:
    function, shared = work
    started_s = time.perf_counter()
    result = function(item, shared)
    return _Timed(result, time.perf_counter() - started_s, _meter.read(), _PROCESS)
