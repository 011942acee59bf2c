"""Send requests to the engines in turn."""

from collections.abc import Sequence

from foretoken.simulator.serving.routing import EngineLoad


class RoundRobinRouter:
    """Remembers whose turn it is."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, loads: Sequence[EngineLoad]) -> int:
        """Return the index of the engine for the next request."""
        chosen = self._next
        self._next = (chosen + 1) % len(loads)
        return chosen


ROUTER = RoundRobinRouter
