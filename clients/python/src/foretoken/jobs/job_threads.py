"""Threads that do jobs, which callers get in turn however many each has waiting."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

_log = logging.getLogger(__name__)

Task = Callable[[], None]


class JobThreads:
    """Up to `num_threads` threads, made as they are needed; each takes the next task when free.

    The next is of the owner of whom the fewest tasks run, among these of who has waited longest for
    one. The tasks of one owner run in their order.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        """Begin without threads."""
        self._num_threads = num_threads
        self._name = name
        self._changed = threading.Condition()
        # Owners in the order in which they had their last task.
        self._waiting: dict[str, deque[Task]] = {}
        self._running: Counter[str] = Counter()
        self._num_made = 0
        self._is_closed = False

    def submit(self, owner: str, task: Task) -> None:
        """Let a task run when it is its turn; none after the end."""
        with self._changed:
            if self._is_closed:
                return
            self._waiting.setdefault(owner, deque()).append(task)
            num_waiting = sum(map(len, self._waiting.values()))
            num_idle = self._num_made - self._running.total()
            if num_waiting > num_idle and self._num_made < self._num_threads:
                name = f"{self._name}_{self._num_made}"
                self._num_made += 1
                threading.Thread(target=self._work, name=name, daemon=True).start()
            self._changed.notify()

    def close(self) -> None:
        """Wait for the tasks that run; what waits never does."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
            # Not joined: Ctrl-C can leave one that was still starting, which cannot be.
            self._changed.wait_for(lambda: not self._running.total())

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            owner, task = taken
            try:
                task()
            except Exception:  # noqa: BLE001
                # The boundary of the thread, which has other tasks to do.
                _log.exception("a job could not be run")
            finally:
                with self._changed:
                    self._running[owner] -= 1
                    self._changed.notify_all()

    def _take(self) -> tuple[str, Task] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            owner = min(self._waiting, key=lambda one: self._running[one])
            tasks = self._waiting.pop(owner)
            task = tasks.popleft()
            if tasks:
                self._waiting[owner] = tasks  # behind the others
            self._running[owner] += 1
            return owner, task
