"""Every rank sends a different shard to every other rank."""

from foretoken.domain.collective import collective_dims, collective_features, sweep_groups
from foretoken.domain.operator import Dims, OperatorSpec
from foretoken.domain.units import Quantity


def _moved_bytes(d: Dims, _element_bytes: float) -> Quantity:
    ranks = d["devices_per_node"] * d["num_nodes"]
    return d["message_bytes"] * (ranks - 1) / ranks


SPEC = OperatorSpec(
    name="all_to_all",
    summary="exchange shards between all pairs of ranks",
    dims=collective_dims("bytes one rank sends, its own share included"),
    flops=lambda d, _: 0 * d["message_bytes"],
    moved_bytes=_moved_bytes,
    features=collective_features(),
    sweep=sweep_groups,
    is_collective=True,
)
