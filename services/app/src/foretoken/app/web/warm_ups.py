"""Questions answered while they are still written, so that their answer need not be waited for.

The first question of a model on a device reads and learns the series of its operators, which takes
longer than all that follows.
"""

import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, Protocol, runtime_checkable

from foretoken.app.web.calls import OfferedServices
from foretoken.domain.requests.search import ServingSearchRequest
from foretoken.domain.requests.training_search import TrainingSearchRequest

Request = ServingSearchRequest | TrainingSearchRequest

# Questions of the form that are remembered.
_KEPT: Final = 256


@runtime_checkable
class WarmsUp(Protocol):
    """A simulator of this process; one behind an address has its own ways to be warm."""

    def warm_up(self, request: Request) -> None:
        """Answer a question for nobody."""


class WarmUps:
    """Warms questions up one after the other, once for each model on each device."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="warm-up")
        self._begun: dict[Hashable, Future[None]] = {}
        self._lock = threading.Lock()

    def begin(self, offered: OfferedServices, request: Request) -> None:
        """Let a question be answered in the background, unless one like it was.

        What is wrong with it is reported when the question is sent.
        """
        key = _key(request)
        with self._lock:
            if key in self._begun:
                return
            for other in self._begun.values():
                # The form says something else by now.
                other.cancel()
            self._begun = {name: one for name, one in self._begun.items() if not one.cancelled()}
            if len(self._begun) == _KEPT:
                del self._begun[next(iter(self._begun))]
            self._begun[key] = self._thread.submit(_warm_up, offered, request)

    def settle(self, request: Request, timeout_s: float) -> None:
        """Wait for the warm-up of a question, if one runs: two at once take twice as long."""
        with self._lock:
            begun = self._begun.get(_key(request))
        if begun is not None and not begun.cancel():
            wait((begun,), timeout_s)

    def close(self) -> None:
        """Begin no other, and wait for the one that runs."""
        self._thread.shutdown(cancel_futures=True)


def _warm_up(offered: OfferedServices, request: Request) -> None:
    # Opening it takes its time, too.
    simulator = offered.port("simulator")
    if isinstance(simulator, WarmsUp):
        simulator.warm_up(request)


def _key(request: Request) -> Hashable:
    """Return what decides which series a question needs."""
    scenario, space = request.scenario, request.space
    if isinstance(request, ServingSearchRequest):
        software: Hashable = request.space.profiles or request.scenario.engine.profile
    else:
        software = request.scenario.trainer.profile
    devices = tuple(space.devices) or (scenario.device,)
    return type(request), scenario.model, scenario.dtype, devices, software
