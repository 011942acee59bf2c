"""Make the collective operators of a rank's graph."""

import dataclasses
from dataclasses import dataclass
from typing import Self

from foretoken.domain.lowering.graph import OperatorNode, Overlap, RankContext, Section
from foretoken.domain.lowering.placement import (
    RankGroup,
    axis_group,
    neighbour_dims,
    stage_pair_dims,
)
from foretoken.domain.units import Quantity, ceil_divide


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
            repeat=near.repeat,
            first_layer=near.first_layer,
            layer_stride=near.layer_stride,
            axis=self.axis,
            num_sharing=self.num_sharing,
        )


def overlapped_with(node: OperatorNode, role: str, *, is_hidden: bool = True) -> OperatorNode:
    """Return a collective concurrent with the operators of a role; exposed if not hidden."""
    if not is_hidden or node.section is not Section.LAYER:
        return node
    return dataclasses.replace(node, overlap=Overlap.CONCURRENT, overlaps_with=role)
