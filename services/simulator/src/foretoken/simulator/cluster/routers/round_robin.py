"""Send requests to the engines in turn."""

from collections.abc import Mapping, Sequence

from foretoken.simulator.cluster.routing import EngineLoad, RoutedRequest
from foretoken.simulator.serving.policy_options import PolicyOptions


class RoundRobinRouter:
    """Remembers whose turn it is: the first engine from there on."""

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        del seed
        PolicyOptions("routing", options)
        self._next = 0

    def choose(
        self, request: RoutedRequest, engines: Sequence[int], loads: Mapping[int, EngineLoad]
    ) -> int:
        """Return the next engine; one that is not there loses its turn."""
        del request, loads
        chosen = next((engine for engine in engines if engine >= self._next), engines[0])
        self._next = chosen + 1
        return chosen


ROUTER = RoundRobinRouter
