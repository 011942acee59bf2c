"""Where ranks of a group sit, and the collective operators between them.

Ranks are numbered with tp fastest, then cp, dp and pp, so tensor-parallel groups share a node
wherever they fit. Experts see the ranks of tp, cp and dp as a mesh of their own: the ranks that
split an expert fastest, then those of ep, then those that hold the same experts.
Source: Megatron-Core's default rank order, and that of its expert groups.
"""

import dataclasses
from dataclasses import dataclass, replace
from typing import Self

from foretoken.domain.lowering.graph import OperatorNode, Overlap, RankContext, Section
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.units import Quantity, ceil_divide

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedGroup:
    """A group of ranks on the machine: the dimensions of its collectives, and who shares links."""

    axis: str
    degree: int
    dims: dict[str, int]
    num_sharing: int = 1

    @classmethod
    def of_rank(cls, group: RankGroup, rank: RankContext) -> Self:
        """Return the group of that kind that a rank belongs to."""
        return cls(
            axis=group.axis,
            degree=group.degree,
            dims=group.dims(rank.devices_per_node),
            num_sharing=group.count_sharing(rank.devices_per_node, rank.ports_per_node),
        )

    @classmethod
    def of_neighbours(cls, axis: str, rank: RankContext) -> Self:
        """Return a rank and the next along an axis; across nodes if any two neighbours are."""
        dims = neighbour_dims(rank.layout, axis, rank.devices_per_node)
        return cls._of_pair(axis, dims, rank)

    @classmethod
    def of_stages(cls, first: int, second: int, rank: RankContext) -> Self:
        """Return a rank and its peer, of two ranks of the pipeline."""
        dims = stage_pair_dims(rank.layout, first, second, rank.devices_per_node)
        return cls._of_pair("pp", dims, rank)

    @classmethod
    def of_nodes(cls, axis: str, rank: RankContext) -> Self:
        """Return a rank and a peer on another node, which need not be like its own."""
        return cls._of_pair(axis, {"devices_per_node": 1, "num_nodes": 2}, rank)

    @classmethod
    def _of_pair(cls, axis: str, dims: dict[str, int], rank: RankContext) -> Self:
        # As many devices of a node send at once as lie between two neighbours.
        num_senders = min(axis_group(rank.layout, axis).stride, rank.devices_per_node)
        num_ports = rank.ports_per_node or rank.devices_per_node
        num_sharing = int(ceil_divide(num_senders, num_ports)) if dims["num_nodes"] > 1 else 1
        return cls(axis=axis, degree=2, dims=dims, num_sharing=num_sharing)

    def collective(
        self, near: OperatorNode, role: str, operator: str, message_bytes: Quantity
    ) -> OperatorNode:
        """Return a collective in the layers, and of the format, of the operator it is near."""
        return OperatorNode(
            role=role,
            group="collective",
            section=near.section,
            operator=operator,
            dims={"message_bytes": message_bytes, **self.dims},
            dtype=near.written_dtype,
            **near.placement,
            axis=self.axis,
            num_sharing=self.num_sharing,
        )


def overlapped_with(node: OperatorNode, role: str, *, is_hidden: bool = True) -> OperatorNode:
    """Return a collective concurrent with the operators of a role; exposed if not hidden."""
    if not is_hidden or node.section is not Section.LAYER:
        return node
    return dataclasses.replace(node, overlap=Overlap.CONCURRENT, overlaps_with=role)
