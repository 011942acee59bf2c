"""Send a request to the less loaded of two engines drawn at random.

Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
"""

from collections.abc import Mapping, Sequence

from foretoken.simulator.cluster.routing import EngineLoad, RoutedRequest, least_outstanding
from foretoken.simulator.serving.policy_options import PolicyOptions
from foretoken.simulator.workload.rng import named_stream


class PowerOfTwoRouter:
    """Draws two different engines; the first drawn wins where both have as many requests."""

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        PolicyOptions("routing", options)
        self._stream = named_stream(seed, "router")

    def choose(
        self, request: RoutedRequest, engines: Sequence[int], loads: Mapping[int, EngineLoad]
    ) -> int:
        """Return the less loaded of two."""
        del request
        if len(engines) == 1:
            return engines[0]
        first = int(self._stream.integers(len(engines)))
        # Any other, equally likely.
        second = (first + 1 + int(self._stream.integers(len(engines) - 1))) % len(engines)
        return least_outstanding((engines[first], engines[second]), loads)


ROUTER = PowerOfTwoRouter
