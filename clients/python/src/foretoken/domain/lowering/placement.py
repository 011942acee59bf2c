"""Where the ranks of a parallel group sit: how many on a node, over how many nodes.

Ranks are numbered with tp fastest, then cp, dp and pp, so tensor-parallel groups share a node
wherever they fit. Experts see the ranks of tp, cp and dp as a mesh of their own: the ranks that
split an expert fastest, then those of ep, then those that hold the same experts.
Source: Megatron-Core's default rank order, and that of its expert groups.
"""

from dataclasses import dataclass, replace

from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.units import Quantity

_ORDER = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """Ranks that communicate: `degree` of them, `stride` apart in the numbering of ranks.

    `axis` is the layout's that a collective of the group belongs to.
    """

    axis: str
    degree: int
    stride: int = 1

    def dims(self, devices_per_node: int) -> dict[str, int]:
        """Return `devices_per_node` and `num_nodes` of the group."""
        room = max(1, devices_per_node // self.stride)
        # Every node of a group holds equally many of its ranks: six over nodes of four are two
        # threes.
        counts = range(1, min(self.degree, room) + 1)
        per_node = max(count for count in counts if self.degree % count == 0)
        return {"devices_per_node": per_node, "num_nodes": self.degree // per_node}

    def over(self, degree: int) -> "RankGroup":
        """Return the group of every `degree`-th rank: those of groups of so many neighbours."""
        return replace(self, degree=self.degree // degree, stride=self.stride * degree)

    def count_sharing(self, devices_per_node: int, ports_per_node: int) -> int:
        """Return how many groups go through a network port of the node at once.

        All devices of a node take part in some group of the kind. A group alone uses as many ports
        as it has ranks on the node, if there are as many.
        """
        dims = self.dims(devices_per_node)
        ports = ports_per_node or devices_per_node
        if dims["num_nodes"] == 1 or ports >= devices_per_node:
            return 1
        alone = max(dims["devices_per_node"], ports)
        return max(1, round(devices_per_node / alone))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMesh:
    """How the ranks of tp, cp and dp hold experts.

    `tp` ranks split each expert by its width, `ep` groups of them hold different experts, and `dp`
    such blocks hold the same.
    """

    tp: int
    ep: int
    dp: int

    @property
    def tensor_group(self) -> RankGroup:
        """Ranks that split an expert."""
        return RankGroup(axis="ep", degree=self.tp)

    @property
    def expert_group(self) -> RankGroup:
        """Ranks that hold different experts."""
        return RankGroup(axis="ep", degree=self.ep, stride=self.tp)


def expert_mesh(layout: ParallelLayout, expert_tp: int = 0) -> ExpertMesh:
    """Return how experts lie; without `expert_tp` an expert is split by what ep leaves of tp."""
    width = int(expert_width(layout.tp, layout.ep, expert_tp))
    num_ranks = layout.tp * layout.cp * layout.dp
    return ExpertMesh(tp=width, ep=layout.ep, dp=max(1, num_ranks // (width * layout.ep)))


def expert_width(tp: Quantity, ep: Quantity, expert_tp: int = 0) -> Quantity:
    """Return the ranks that split an expert: as given, or what ep leaves of tp; 1 if it cannot."""
    return expert_tp or 1 + (tp % ep == 0) * (tp // ep - 1)


def axis_group(layout: ParallelLayout, axis: str) -> RankGroup:
    """Return the group of a rank along one axis of the layout other than ep."""
    return RankGroup(axis=axis, degree=layout.degree(axis), stride=_stride(layout, axis))


def group_dims(layout: ParallelLayout, axis: str, devices_per_node: int) -> dict[str, int]:
    """Return `devices_per_node` and `num_nodes` of a group along one axis."""
    return axis_group(layout, axis).dims(devices_per_node)


def neighbour_dims(layout: ParallelLayout, axis: str, devices_per_node: int) -> dict[str, int]:
    """Return the group of two neighbours along an axis; across nodes if any pair is."""
    if _stride(layout, axis) * layout.degree(axis) <= devices_per_node:
        return {"devices_per_node": 2, "num_nodes": 1}
    return {"devices_per_node": 1, "num_nodes": 2}


def stage_pair_dims(
    layout: ParallelLayout, first: int, second: int, devices_per_node: int
) -> dict[str, int]:
    """Return the group of two ranks of a pipeline; across nodes if any pair of theirs is."""
    stride = _stride(layout, "pp")
    is_across = any(
        (first * stride + offset) // devices_per_node
        != (second * stride + offset) // devices_per_node
        for offset in range(stride)
    )
    if is_across:
        return {"devices_per_node": 1, "num_nodes": 2}
    return {"devices_per_node": 2, "num_nodes": 1}


def _stride(layout: ParallelLayout, axis: str) -> int:
    stride = 1
    for faster in _ORDER[: _ORDER.index(axis)]:
        stride *= layout.degree(faster)
    return stride
