"""How requests are spread over engines: the contract of `routers/`."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class EngineLoad(NamedTuple):
    """Requests that wait at an engine and that run on it."""

    num_waiting: int
    num_running: int


class Router(Protocol):
    """Spreads requests over engines."""

    def choose(self, loads: Sequence[EngineLoad]) -> int:
        """Return the index of the engine for the next request."""
