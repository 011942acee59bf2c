"""Actions on what takes too long, all in one thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICK_S = 0.5


class TimeLimits:
    """Does something about what has not ended in time, up to half a second late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing that is watched."""
        self._clock = clock
        self._watched: dict[object, tuple[float, Callable[[], object]]] = {}
        self._is_closed = threading.Event()

    def open(self) -> None:
        """Look at the clock now and then, in a thread of its own."""
        threading.Thread(target=self._look_on, name="time limits", daemon=True).start()

    def close(self) -> None:
        """End that thread."""
        self._is_closed.set()

    @contextmanager
    def act_after(self, limit_s: float, action: Callable[[], object]) -> Iterator[None]:
        """Do the action, once and in another thread, where the block takes longer."""
        key = object()
        self._watched[key] = (self._clock() + limit_s, action)
        try:
            yield
        finally:
            self._watched.pop(key, None)

    def act(self) -> None:
        """Do what is due."""
        now = self._clock()
        # Of a copy, which is made in one piece: blocks begin and end meanwhile.
        for key, (due, action) in self._watched.copy().items():
            if now >= due and self._watched.pop(key, None) is not None:
                action()

    def _look_on(self) -> None:
        while not self._is_closed.wait(_TICK_S):
            self.act()
