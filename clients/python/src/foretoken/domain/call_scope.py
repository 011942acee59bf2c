"""How long the call that a thread answers is wanted: calls made for it take no longer."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from foretoken.domain.errors import ServiceUnavailableError


@dataclass(frozen=True, slots=True)
class CallScope:
    """When a call ends, by `time.monotonic`, and whether its caller still waits."""

    ends_s: float
    is_awaited: Callable[[], bool]

    def check(self) -> None:
        """Do nothing while the call is wanted.

        Raises:
            ServiceUnavailableError: the caller has left, or its deadline has passed.

        """
        if time.monotonic() >= self.ends_s or not self.is_awaited():
            raise ServiceUnavailableError(
                "the call was ended: its caller has left, or its deadline has passed"
            )


_SCOPE: ContextVar[CallScope | None] = ContextVar("scope of this thread's call", default=None)


def current_scope() -> CallScope | None:
    """Return that of the call which this thread answers, none within a program or a job."""
    return _SCOPE.get()


@contextmanager
def call_scope(time_left_s: float | None, is_awaited: Callable[[], bool]) -> Iterator[None]:
    """Answer a call in this thread that ends in so many seconds (None: it has no deadline)."""
    ends_s = math.inf if time_left_s is None else time.monotonic() + time_left_s
    token = _SCOPE.set(CallScope(ends_s, is_awaited))
    try:
        yield
    finally:
        # A stream that was let go may be closed by another thread.
        with suppress(ValueError):
            _SCOPE.reset(token)


@contextmanager
def beyond_call() -> Iterator[None]:
    """Do in this thread what is of use to later calls as well, however long this one is wanted."""
    token = _SCOPE.set(None)
    try:
        yield
    finally:
        _SCOPE.reset(token)


def within_call(at_most_s: float) -> float:
    """Return the seconds that something may take: no more than its call has left."""
    scope = _SCOPE.get()
    return at_most_s if scope is None else min(at_most_s, max(scope.ends_s - time.monotonic(), 0.0))


def check_wanted() -> None:
    """Do nothing while the call that this thread answers is wanted, or where it answers none.

    Raises:
        ServiceUnavailableError: its caller has left, or its deadline has passed.

    """
    scope = _SCOPE.get()
    if scope is not None:
        scope.check()
