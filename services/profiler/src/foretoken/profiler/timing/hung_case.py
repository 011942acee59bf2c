"""End a process whose case does not: nothing else stops a kernel that never returns."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foretoken.domain.measurements.estimate import OperatorCall

_log = logging.getLogger(__name__)

# EX_TEMPFAIL of sysexits.h: starting again goes on.
EXIT_STATUS = 75


def _leave() -> None:
    # Threads that hang in a kernel would keep an orderly exit from ending.
    os._exit(EXIT_STATUS)


class HungCaseWatch:
    """Waits next to the thread that times; at `limit_s` it says so and ends the process.

    `on_hung` is given the call and a reason first, from a thread of its own: there is time to note
    a failed row, by which the next start goes on behind it. With `limit_s` 0 nothing is watched.
    """

    def __init__(
        self,
        limit_s: float,
        on_hung: Callable[[OperatorCall, str], None],
        leave: Callable[[], None] = _leave,
    ) -> None:
        """Keep the limit and what to do."""
        self._limit_s = limit_s
        self._on_hung = on_hung
        self._leave = leave

    @contextmanager
    def watch(self, call: OperatorCall) -> Iterator[None]:
        """Watch while the block runs."""
        if self._limit_s <= 0:
            yield
            return
        timer = threading.Timer(self._limit_s, self._give_up, (call,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, call: OperatorCall) -> None:
        reason = f"HungCaseError: did not end in {self._limit_s:g} s"
        _log.error(
            "operator=%s dims=%s %s; the process ends, start the same profile again to go on",
            call.operator,
            dict(call.dims),
            reason,
        )
        try:
            self._on_hung(call, reason)
        finally:
            self._leave()
