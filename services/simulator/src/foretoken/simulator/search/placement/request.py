"""What a search over a mixed cluster is asked: how many points it has, and whether it can be."""

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.simulator.search.placement.strategy import PlacementSpace, fixed_axes


def count_placements(request: TrainingSearchRequest) -> int:
    """Return how many points a search over a mixed cluster would look at.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.
        InvalidRequestError: kinds of nodes that cannot be used.

    """
    return PlacementSpace(request).num_points


def check_placements(request: TrainingSearchRequest) -> None:
    """Refuse what a mixed cluster is not searched over.

    Raises:
        InvalidRequestError: with one violation per reason.

    """
    space, scenario = request.space, request.scenario
    unpriced = sorted(
        {
            group.device
            for group in space.node_groups
            if not (group.usd_per_hour or space.usd_per_hour.get(group.device))
        }
    )
    fixed = ", ".join(fixed_axes(space, scenario))
    given = [
        name
        for name in ("stage_layers", "stage_devices", "stage_topologies", "module_times")
        if getattr(scenario, name)
    ]
    InvalidRequestError.check(
        "search",
        {
            "objective": (
                request.objective != "cost" or not unpriced,
                f"to rank by cost, price {', '.join(unpriced)}: `usd_per_hour` of its node group",
            ),
            "space": (not fixed, f"a mixed cluster is not searched over {fixed}; leave it out"),
            "scenario": (not given, f"the search sets {', '.join(given)}; leave it out"),
            "recompute_layers": (
                scenario.recompute_layers == 0,
                "stages have different numbers of layers; leave it 0",
            ),
        },
    )
