"""The threads of one method, and which calls may have them."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from foretoken.domain.errors import ServerBusyError, ServiceUnavailableError

# How often a large call that waits looks whether it is still wanted.
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeLimits:
    """Calls of `min_rows` and more are large: `num_at_once` run, and up to `max_present` are there.

    More are refused, and may come again after `retry_after_s`.
    """

    min_rows: int
    num_at_once: int
    max_present: int
    retry_after_s: float


class LargeCalls:
    """Lets few large calls of a method run at once, so that small ones find a thread.

    The others wait, with a thread each.
    """

    def __init__(
        self,
        weigh: Callable[[Any], int],
        limits: LargeLimits,
        count_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep the limits; `weigh` says how many rows a request's message is about."""
        self._weigh = weigh
        self._limits = limits
        self._count_refused = count_refused
        self._places = threading.Semaphore(limits.num_at_once)
        self._lock = threading.Lock()
        self._num_present = 0

    @contextmanager
    def admit(self, request: Any, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """Let a call run when there is a place for it, at once where it is small.

        Raises:
            ServerBusyError: too many large ones are there.
            ServiceUnavailableError: it is not wanted any more.

        """
        if self._weigh(request) < self._limits.min_rows:
            yield
            return
        with self._present(), self._placed(is_wanted):
            yield

    @contextmanager
    def _present(self) -> Iterator[None]:
        limits = self._limits
        with self._lock:
            has_room = self._num_present < limits.max_present
            self._num_present += has_room
        if not has_room:
            self._count_refused()
            raise ServerBusyError(
                f"{limits.max_present} calls of {limits.min_rows} rows and more are there already;"
                " try again later, or with fewer rows",
                limits.retry_after_s,
            )
        try:
            yield
        finally:
            with self._lock:
                self._num_present -= 1

    @contextmanager
    def _placed(self, is_wanted: Callable[[], bool]) -> Iterator[None]:
        while not self._places.acquire(timeout=_LOOK_EVERY_S):
            if not is_wanted():
                raise ServiceUnavailableError("the caller left before its call had a place")
        try:
            yield
        finally:
            self._places.release()


class Lane:
    """The threads of one method, and the calls that run in them or wait for one."""

    def __init__(self, method: str, num_threads: int, max_queued: int) -> None:
        """Begin without calls; threads are made as they are needed."""
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix=method.rpartition("/")[2])
        self.num_threads = num_threads
        self.max_queued = max_queued
        self._lock = threading.Lock()
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """Calls that run or wait."""
        return self._num_calls

    def enter(self) -> bool:
        """Take one more call, if there is room."""
        with self._lock:
            has_room = self._num_calls < self.num_threads + self.max_queued
            self._num_calls += has_room
        return has_room

    def leave(self) -> None:
        """End a call."""
        with self._lock:
            self._num_calls -= 1

    def describe(self) -> str:
        """Return what it takes, for who is refused."""
        queued = f", and {self.max_queued} wait" if self.max_queued else ""
        return f"{self.num_threads} of its calls run already{queued}"
