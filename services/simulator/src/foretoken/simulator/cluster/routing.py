"""How requests are spread over engines: the contract of `routers/`."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.plugins import scan_modules


class EngineLoad(NamedTuple):
    """What is on an engine: requests that wait and run, and the share of KV blocks in use.

    `num_outstanding_tokens` are prompt tokens yet to compute of what waits, roughly.
    """

    num_waiting: int
    num_running: int
    num_outstanding_tokens: int = 0
    kv_utilization_ratio: float = 0.0

    @property
    def num_outstanding(self) -> int:
        """Requests on the engine."""
        return self.num_waiting + self.num_running


def _no_blocks(_: int) -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


class RoutedRequest(NamedTuple):
    """What a router may look at.

    `number` is its place in the plan, `session` names a conversation, `adapter` is the LoRA adapter
    it uses (-1: none). `read_blocks` returns the blocks of a request by its number.
    """

    number: int
    num_prefill_tokens: int
    session: int = -1
    adapter: int = -1
    block_tokens: int = 0
    read_blocks: Callable[[int], NDArray[np.int64]] = _no_blocks

    @property
    def blocks(self) -> NDArray[np.int64]:
        """What the prompt says, `block_tokens` tokens an entry.

        Equal leading entries of two requests are equal prompts so far.
        """
        return self.read_blocks(self.number)


class Router(Protocol):
    """Spreads requests over the engines that take some now."""

    def choose(
        self, request: RoutedRequest, engines: Sequence[int], loads: Mapping[int, EngineLoad]
    ) -> int:
        """Return one of `engines` (ascending, not empty) for a request.

        `loads` are what the router knows of each, which may be old.
        """


class RouterFactory(Protocol):
    """What a module of `routers/` offers as its `ROUTER`."""

    def __call__(self, options: Mapping[str, str], seed: int) -> Router:
        """Return a router.

        Raises:
            InvalidRequestError: an option it does not know, or a value it cannot use.

        """


def find_router(name: str) -> RouterFactory:
    """Return the plug-in of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    return UnknownPluginError.look_up(name, all_routers(), "routing.router", "router")


def all_routers() -> Mapping[str, RouterFactory]:
    """Return every router by name: one module each in `routers/`."""
    return scan_modules("foretoken.simulator.cluster.routers", "ROUTER")


def least_outstanding(engines: Sequence[int], loads: Mapping[int, EngineLoad]) -> int:
    """Return the engine with the fewest requests; the first of equals."""
    if len(engines) == 1:
        return engines[0]
    return min(engines, key=lambda engine: loads[engine].num_outstanding)
