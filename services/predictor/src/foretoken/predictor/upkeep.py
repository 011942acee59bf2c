"""Work that a predictor does again and again besides answering."""

import logging
import threading
from collections.abc import Callable

from foretoken.domain.errors import ForetokenError

_log = logging.getLogger(__name__)

# How long a stop waits for work under way. Work that waits for a catalog that does not answer ends
# when its connection is closed.
_STOP_WAIT_S = 5.0

# Given a function that tells when to end early.
Work = Callable[[Callable[[], bool]], object]


class RepeatedWork:
    """A thread that does one piece of work every so often, until it is stopped.

    Work that fails is tried again the next time; only the first of several expected failures in a
    row is a warning.
    """

    def __init__(self, name: str, work: Work, interval_s: float) -> None:
        """Keep what to do; the first time comes after one interval."""
        self._name = name
        self._work = work
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_failing = False

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End at once, work under way where it looks."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_WAIT_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._work(self._stopped.is_set)
            except ForetokenError as err:
                level = logging.DEBUG if self._is_failing else logging.WARNING
                _log.log(level, "%s failed, will be tried again: %s", self._name, err.message)
                self._is_failing = True
            except Exception:  # noqa: BLE001 - nobody would miss a thread that ended
                _log.exception("%s failed unexpectedly, will be tried again", self._name)
            else:
                self._is_failing = False
