"""Send a request to the engine with the least to do; the first of equals.

A waiting request weighs four running ones. Source: vLLM's data-parallel load balancing
(`v1/engine/core_client.py`, DPLBAsyncMPClient).
"""

from collections.abc import Mapping, Sequence

from foretoken.simulator.cluster.routing import EngineLoad, RoutedRequest
from foretoken.simulator.serving.policy_options import PolicyOptions

_WAITING_WEIGHT = 4.0


class LeastLoadedRouter:
    """Weighs what waits and what runs; option `waiting_weight`."""

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        del seed
        read = PolicyOptions("routing", options, ("waiting_weight",))
        self._weight = read.number("waiting_weight", _WAITING_WEIGHT)

    def choose(
        self, request: RoutedRequest, engines: Sequence[int], loads: Mapping[int, EngineLoad]
    ) -> int:
        """Return the engine with the least weight on it."""
        del request
        return min(engines, key=lambda engine: self._weigh(loads[engine]))

    def _weigh(self, load: EngineLoad) -> float:
        return self._weight * load.num_waiting + load.num_running


ROUTER = LeastLoadedRouter
