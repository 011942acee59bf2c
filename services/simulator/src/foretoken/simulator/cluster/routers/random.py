"""Send a request to any engine, all equally likely."""

from collections.abc import Mapping, Sequence

from foretoken.simulator.cluster.routing import EngineLoad, RoutedRequest
from foretoken.simulator.serving.policy_options import PolicyOptions
from foretoken.simulator.workload.rng import named_stream


class RandomRouter:
    """Draws from a stream of its own."""

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        PolicyOptions("routing", options)
        self._stream = named_stream(seed, "router")

    def choose(
        self, request: RoutedRequest, engines: Sequence[int], loads: Mapping[int, EngineLoad]
    ) -> int:
        """Return any of the engines."""
        del request, loads
        return engines[int(self._stream.integers(len(engines)))]


ROUTER = RandomRouter
