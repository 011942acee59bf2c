"""Where the ranks of a parallel group sit: how many on a node, over how many nodes.

Ranks are numbered with tp fastest, then cp, dp and pp, so tensor-parallel groups share a node
wherever they fit. Source: Megatron-Core's default rank order.
"""

from foretoken.domain.layout import ParallelLayout

_ORDER = ("tp", "cp", "dp", "pp")


def group_dims(layout: ParallelLayout, axis: str, devices_per_node: int) -> dict[str, int]:
    """Return `devices_per_node` and `num_nodes` of a group along one axis."""
    stride = _stride(layout, axis)
    degree = layout.degree(axis)
    room = max(1, devices_per_node // stride)
    # Every node of a group holds equally many of its ranks: six over nodes of four are two threes.
    per_node = max(count for count in range(1, min(degree, room) + 1) if degree % count == 0)
    return {"devices_per_node": per_node, "num_nodes": degree // per_node}


def neighbour_dims(layout: ParallelLayout, axis: str, devices_per_node: int) -> dict[str, int]:
    """Return the group of two neighbours along an axis; across nodes if any pair is."""
    if _stride(layout, axis) * layout.degree(axis) <= devices_per_node:
        return {"devices_per_node": 2, "num_nodes": 1}
    return {"devices_per_node": 1, "num_nodes": 2}


def _stride(layout: ParallelLayout, axis: str) -> int:
    stride = 1
    for faster in _ORDER[: _ORDER.index(axis)]:
        stride *= layout.degree(faster)
    return stride
