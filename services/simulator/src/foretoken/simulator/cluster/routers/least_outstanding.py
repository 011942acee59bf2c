"""Send a request to the engine with the fewest requests, those that wait included."""

from collections.abc import Mapping, Sequence

from foretoken.simulator.cluster.routing import EngineLoad, RoutedRequest, least_outstanding
from foretoken.simulator.serving.policy_options import PolicyOptions


class LeastOutstandingRouter:
    """Looks at the requests on every engine."""

    def __init__(self, options: Mapping[str, str], seed: int) -> None:
        del seed
        PolicyOptions("routing", options)

    def choose(
        self, request: RoutedRequest, engines: Sequence[int], loads: Mapping[int, EngineLoad]
    ) -> int:
        """Return the engine with the fewest requests."""
        del request
        return least_outstanding(engines, loads)


ROUTER = LeastOutstandingRouter
