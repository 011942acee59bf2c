"""Where the ranks of a parallel group sit: how many on a node, over how many nodes.

Ranks are numbered with tp fastest, then cp, dp and pp, so tensor-parallel groups share a node
wherever they fit. Source: Megatron-Core's default rank order.
"""

from foretoken.domain.layout import ParallelLayout
from foretoken.domain.units import ceil_divide

_ORDER = ("tp", "cp", "dp", "pp")


def group_dims(layout: ParallelLayout, axis: str, devices_per_node: int) -> dict[str, int]:
    """Return `devices_per_node` and `num_nodes` of a group along one axis."""
    stride = _stride(layout, axis)
    degree = layout.degree(axis)
    per_node = min(degree, max(1, devices_per_node // stride))
    return {"devices_per_node": per_node, "num_nodes": int(ceil_divide(degree, per_node))}


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
