"""Send requests to the replicas in turn."""

from collections.abc import Sequence


class RoundRobinRouter:
    """Remembers whose turn it is."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, num_outstanding: Sequence[int]) -> int:
        """Return the index of the replica for the next request.

        `num_outstanding` counts the unfinished requests of each replica.
        """
        chosen = self._next
        self._next = (chosen + 1) % len(num_outstanding)
        return chosen


ROUTER = RoundRobinRouter
