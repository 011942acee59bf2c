"""Run tasks in processes of this machine."""

import logging
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

from foretoken.domain.errors import ServiceUnavailableError
from foretoken.jobs.executor import (
    CHECK_PERIOD_S,
    MAX_ATTEMPTS,
    R,
    S,
    T,
    WorkerCounts,
    keep_going,
    pack_function,
)
from foretoken.jobs.executors.outcome import Outcome
from foretoken.jobs.executors.worker import FORGET, START, TASK
from foretoken.jobs.process_setup import ONE_THREAD

_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def count_cores(quota_file: Path = _QUOTA_FILE) -> int:
    """Return the cores this process may use, as a container's limit and its affinity allow."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return max(min(num_cores, _read_quota(quota_file)), 1)


def _read_quota(path: Path) -> int:
    """Return the whole cores of a control group's quota, "<microseconds> <of so many>" or "max"."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return os.cpu_count() or 1


class WorkerDiedError(Exception):
    """A worker process ended; the message says how."""


class WorkerProcess:
    """A process that does one task at a time, of any of the runs that were started in it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._tasks = cast("IO[bytes]", process.stdin)
        self._answers = cast("IO[bytes]", process.stdout)
        self.runs: set[int] = set()

    @classmethod
    def start(cls) -> Self:
        """Start a worker that finds the modules this process finds.

        Raises:
            WorkerDiedError: no process can be started.

        """
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
        command = [sys.executable, "-m", "foretoken.jobs.executors.worker"]
        try:
            process = subprocess.Popen(  # noqa: S603 - our own program
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
            )
        except OSError as err:
            raise WorkerDiedError(f"cannot be started: {err.strerror}") from err
        return cls(process)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def begin(self, run: int, content: bytes) -> None:
        """Give the pickled function and shared data of a run.

        Raises:
            WorkerDiedError: the process has ended.

        """
        self._tell(START, run, content)
        self.runs.add(run)

    def forget(self, run: int) -> None:
        """Drop what a run shared.

        Raises:
            WorkerDiedError: the process has ended.

        """
        self._tell(FORGET, run)
        self.runs.discard(run)

    def do(self, run: int, item: bytes) -> Outcome:
        """Return what comes of an item; waits for it.

        Raises:
            WorkerDiedError: the process has ended.

        """
        self._tell(TASK, run, item)
        try:
            return cast("Outcome", pickle.load(self._answers))  # noqa: S301 - our own worker's
        except (EOFError, OSError, pickle.UnpicklingError) as err:
            raise WorkerDiedError(self._ending()) from err

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._tasks, self._answers):
            try:
                pipe.close()
            except OSError:  # what was written last had nobody to read it
                continue

    def kill(self) -> None:
        """End the process while another thread waits for its answer."""
        self._process.kill()

    def _tell(self, *message: Any) -> None:
        try:
            pickle.dump(message, self._tasks, pickle.HIGHEST_PROTOCOL)
            self._tasks.flush()
        except OSError as err:
            raise WorkerDiedError(self._ending()) from err

    def _ending(self) -> str:
        status = self._process.wait()
        if status == -signal.SIGKILL:
            return "was killed (signal 9), as the system does when memory runs out"
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


_log = logging.getLogger(__name__)


class _Answer(NamedTuple):
    """The outcome of an item, or the error that ends its run."""

    item: int
    outcome: Outcome | None
    error: Exception | None = None


class _Run:
    """One call of `run`: what waits, and the answers that are there."""

    def __init__(self, number: int, content: bytes, items: Sequence[Any]) -> None:
        self.number = number
        self.content = content
        self.items = items
        self.waiting = deque(range(len(items)))
        self.num_attempts: Counter[int] = Counter()
        self.answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()

    def next_answer(self, check: Callable[[], None]) -> _Answer:
        """Wait for an answer, and look now and then whether the run is still wanted."""
        while True:
            check()
            try:
                return self.answers.get(timeout=CHECK_PERIOD_S)
            except queue.Empty:
                continue


class LocalExecutor:
    """Implements `Executor` with worker processes, started when the first run needs them.

    Each has one thread of numerical libraries and one thread here that feeds it, which takes items
    of all runs in turn. Workers end with this process, however it ends. `num_workers` 0: as
    many as there are cores for this process.
    """

    def __init__(self, num_workers: int = 0) -> None:
        self._num_workers = num_workers or count_cores()
        self._numbers = count()
        self._runs: deque[_Run] = deque()
        self._workers: dict[int, WorkerProcess] = {}
        self._feeders: list[threading.Thread] = []
        self._lost: set[int] = set()
        self._num_restarts = 0
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return self._num_workers

    @property
    def workers(self) -> WorkerCounts:
        """Worker processes that are there now, and how many took the place of one that died."""
        with self._changed:
            return WorkerCounts(num_alive=len(self._workers), num_restarts=self._num_restarts)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Numbers of the processes that are there now."""
        with self._changed:
            return tuple(worker.pid for worker in self._workers.values())

    def run(
        self,
        function: Callable[[T, S], R],
        items: Sequence[T],
        shared: S,
        check: Callable[[], None] = keep_going,
    ) -> Iterator[tuple[int, R]]:
        """Yield the index and result of every item as it is done; as `Executor.run`."""
        content = pack_function(function, shared)
        run = _Run(next(self._numbers), content, items)
        self._admit(run)
        try:
            for _ in range(len(items)):
                answer = run.next_answer(check)
                if answer.outcome is None:
                    raise answer.error or RuntimeError("an answer without outcome or error")
                yield answer.item, answer.outcome.unpack()
        finally:
            self._dismiss(run)

    def close(self) -> None:
        """End the workers; runs that wait for results fail."""
        with self._changed:
            self._is_closed = True
            for run in self._runs:
                run.answers.put(_Answer(0, None, _closed()))
            for worker in self._workers.values():
                worker.kill()
            self._changed.notify_all()
        for feeder in self._feeders:
            feeder.join()

    def _admit(self, run: _Run) -> None:
        with self._changed:
            if self._is_closed:
                raise _closed()
            self._runs.append(run)
            for index in range(len(self._feeders), self._num_workers):
                feeder = threading.Thread(
                    target=self._feed, args=(index,), name=f"worker-{index}", daemon=True
                )
                self._feeders.append(feeder)
                feeder.start()
            self._changed.notify_all()

    def _dismiss(self, run: _Run) -> None:
        with self._changed:
            self._runs.remove(run)

    def _feed(self, place: int) -> None:
        """Give items to one worker, and start another where it dies, until all ends."""
        while (task := self._take()) is not None:
            run, index = task
            try:
                worker = self._worker_at(place)
                self._tidy(worker, run)
                item = pickle.dumps(run.items[index], pickle.HIGHEST_PROTOCOL)
                run.answers.put(_Answer(index, worker.do(run.number, item)))
            except WorkerDiedError as err:
                self._lose_worker(place)
                self._give_back(run, index, str(err))
            except Exception as err:  # noqa: BLE001
                # The boundary of the thread: such as an item that cannot be pickled.
                run.answers.put(_Answer(index, None, err))
        self._lose_worker(place)

    def _take(self) -> tuple[_Run, int] | None:
        """Wait for an item, of each run in turn; none when all ends."""
        with self._changed:
            while not self._is_closed:
                for _ in range(len(self._runs)):
                    run = self._runs[0]
                    self._runs.rotate(-1)
                    if run.waiting:
                        return run, run.waiting.popleft()
                self._changed.wait()
            return None

    def _worker_at(self, place: int) -> WorkerProcess:
        with self._changed:
            if self._is_closed:
                raise WorkerDiedError("is not needed any more")
            if place not in self._workers:
                self._workers[place] = WorkerProcess.start()
                self._num_restarts += place in self._lost
                self._lost.discard(place)
            return self._workers[place]

    def _tidy(self, worker: WorkerProcess, run: _Run) -> None:
        """Let a worker know a run, and forget those that ended."""
        with self._changed:
            running = {known.number for known in self._runs}
        for number in worker.runs - running - {run.number}:
            worker.forget(number)
        if run.number not in worker.runs:
            worker.begin(run.number, run.content)

    def _lose_worker(self, place: int) -> None:
        with self._changed:
            self._lost.add(place)
            worker = self._workers.pop(place, None)
        if worker is not None:
            worker.stop()

    def _give_back(self, run: _Run, index: int, how: str) -> None:
        """Let another worker do an item, or give up on it."""
        with self._changed:
            if self._is_closed or run not in self._runs:
                return
            run.num_attempts[index] += 1
            num_attempts = run.num_attempts[index]
            _log.warning("a worker died item=%d attempt=%d: it %s", index, num_attempts, how)
            if num_attempts < MAX_ATTEMPTS:
                run.waiting.appendleft(index)
                self._changed.notify_all()
                return
        message = (
            f"the worker process of item {index} {how}, {num_attempts} times; give the search"
            " fewer workers or the machine more memory"
        )
        run.answers.put(_Answer(index, None, ServiceUnavailableError(message)))


def _closed() -> ServiceUnavailableError:
    return ServiceUnavailableError("the workers have been stopped: the service is ending")
