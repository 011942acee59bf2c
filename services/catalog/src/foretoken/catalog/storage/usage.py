"""Which callers use a thing at the moment, and a moment at which nobody does."""

import contextlib
import threading
from collections.abc import Iterator


class Usage:
    """Counts users. Safe to use from several threads."""

    def __init__(self) -> None:
        """Begin with none."""
        self._changed = threading.Condition()
        self._num_users = 0

    @property
    def num_users(self) -> int:
        """How many there are now."""
        return self._num_users

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Be a user until the end; waits while `idle` lasts."""
        with self._changed:
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def idle(self, wait_s: float) -> Iterator[bool]:
        """Wait for a moment without users and keep it so; false when there was none in time.

        New users come in until that moment: one that waits for another must not wait for this.
        """
        with self._changed:
            yield self._changed.wait_for(lambda: not self._num_users, wait_s)
