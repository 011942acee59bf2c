"""Who makes the call that a thread answers, and how much of something callers may use."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from foretoken.domain.errors import QuotaError

_CALLER: ContextVar[str] = ContextVar("caller of this thread", default="")

# Callers whose use has long been forgotten are looked for when there are so many.
_MANY_CALLERS = 1_000


def current_caller() -> str:
    """Return the name of who makes the call that is answered; empty within a program."""
    return _CALLER.get()


@contextmanager
def answering(caller: str) -> Iterator[None]:
    """Answer a call of that caller in this thread."""
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        # A stream that was let go may be closed by another thread.
        with suppress(ValueError):
            _CALLER.reset(token)


class Allowance:
    """How much of something each caller may use in any `period_s`; what was used fades evenly.

    Safe to use from several threads. It begins anew with the process. `limit` 0: any amount.
    """

    def __init__(
        self,
        limit: float,
        period_s: float,
        what: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the limit; `what` is what is used, for people: "seconds of SQL an hour"."""
        self._limit = limit
        self._period_s = period_s
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        # Of each caller what it had used, and when.
        self._used: dict[str, tuple[float, float]] = {}

    def check(self, caller: str) -> None:
        """Let a caller begin who has something left; what begins may use more than that.

        Raises:
            QuotaError: it has nothing left.

        """
        if not self._limit or not caller:
            return
        with self._lock:
            used = self._used_by(caller)
        if used >= self._limit:
            wait_s = (used - self._limit) * self._period_s / self._limit
            raise QuotaError(
                f"{caller} has used up its {self._limit:g} {self._what}; try again in"
                f" {max(wait_s, 1.0):.0f} s",
                caller=caller,
            )

    def spend(self, caller: str, amount: float) -> None:
        """Count what a caller has used."""
        if not self._limit or not caller:
            return
        with self._lock:
            if len(self._used) >= _MANY_CALLERS:
                self._used = {
                    name: use for name, use in self._used.items() if self._used_by(name) > 0
                }
            self._used[caller] = (self._used_by(caller) + amount, self._clock())

    def _used_by(self, caller: str) -> float:
        used, when_s = self._used.get(caller, (0.0, 0.0))
        return max(used - (self._clock() - when_s) * self._limit / self._period_s, 0.0)
