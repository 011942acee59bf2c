"""Send the requests of a session to one engine; a new session to the one with the fewest requests.

A session whose engine takes no requests now (it failed, is full, or was given up) moves to the one
with the fewest and stays there.
"""

from collections.abc import Mapping, Sequence

from foretoken.simulator.cluster.routing import EngineLoad, RoutedRequest, least_outstanding
from foretoken.simulator.serving.policy_options import PolicyOptions


class SessionStickyRouter:
    """Remembers the engine of every session."""

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        del seed
        PolicyOptions("routing", options)
        self._engine_of: dict[int, int] = {}

    def choose(
        self, request: RoutedRequest, engines: Sequence[int], loads: Mapping[int, EngineLoad]
    ) -> int:
        """Return the engine of the request's session; a request of none goes where least is."""
        if request.session < 0:
            return least_outstanding(engines, loads)
        engine = self._engine_of.get(request.session)
        if engine is None or engine not in engines:
            engine = least_outstanding(engines, loads)
            self._engine_of[request.session] = engine
        return engine


ROUTER = SessionStickyRouter
