"""Sum a tensor over all ranks of a group; every rank gets the sum."""

from foretoken.domain.collective import collective_dims, collective_features, sweep_groups
from foretoken.domain.operator import Dims, OperatorSpec
from foretoken.domain.units import Quantity


def _moved_bytes(d: Dims, _element_bytes: float) -> Quantity:
    ranks = d["devices_per_node"] * d["num_nodes"]
    return 2 * d["message_bytes"] * (ranks - 1) / ranks


SPEC = OperatorSpec(
    name="all_reduce",
    summary="ring all-reduce: reduce-scatter then all-gather",
    dims=collective_dims("bytes of the tensor on one rank"),
    flops=lambda d, _: 0 * d["message_bytes"],
    moved_bytes=_moved_bytes,
    features=collective_features(),
    sweep=sweep_groups,
    is_collective=True,
    shares_node_links=True,
)
