"""Work that a thread of its own does at regular intervals."""

import threading
from collections.abc import Callable


class RegularWork:
    """Calls a function every so often, from `start` to `stop`."""

    def __init__(self, name: str, interval_s: float, work: Callable[[], None]) -> None:
        """Keep what to do; `name` is what the thread is called."""
        self._name = name
        self._interval_s = interval_s
        self._work = work
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; the first call comes after one interval."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for a call that runs, and make no more; harmless when nothing was begun."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._work()
