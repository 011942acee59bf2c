"""Send a request to the engine with the least to do; the first of equals.

A waiting request weighs four running ones. Source: vLLM's data-parallel load balancing.
"""

from collections.abc import Sequence

from foretoken.simulator.serving.routing import EngineLoad

_WAITING_WEIGHT = 4


class LeastLoadedRouter:
    """Looks at all engines at the moment the request is ready."""

    def choose(self, loads: Sequence[EngineLoad]) -> int:
        """Return the index of the engine for the next request."""
        weights = [_WAITING_WEIGHT * load.num_waiting + load.num_running for load in loads]
        return weights.index(min(weights))


ROUTER = LeastLoadedRouter
