"""Collect the shards of all ranks on every rank."""

from foretoken.domain.collective import collective_dims, collective_features, sweep_groups
from foretoken.domain.operator import Dims, OperatorSpec
from foretoken.domain.units import Quantity


def _moved_bytes(d: Dims, _element_bytes: float) -> Quantity:
    ranks = d["devices_per_node"] * d["num_nodes"]
    return d["message_bytes"] * (ranks - 1) / ranks


SPEC = OperatorSpec(
    name="all_gather",
    summary="every rank receives all shards",
    dims=collective_dims("bytes of the gathered tensor"),
    flops=lambda d, _: 0 * d["message_bytes"],
    moved_bytes=_moved_bytes,
    features=collective_features(),
    sweep=sweep_groups,
    is_collective=True,
    shares_node_links=True,
)
