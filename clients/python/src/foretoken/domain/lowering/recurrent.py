"""What layers with a recurrent state run between their projections."""

from collections.abc import Iterator, Mapping

from foretoken.domain.lowering.batch_dims import parts_of, state_dims
from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder


def lower_recurrent(
    builder: NodeBuilder, operator: str, dims: Mapping[str, int], convolved: Mapping[str, int]
) -> Iterator[OperatorNode]:
    """Yield the convolution and the recurrence, of the prefilling and of the decoding part.

    `dims` are those of the recurrence that are of no batch, `convolved` those of the convolution.
    """
    for name, part in parts_of(builder.shape):
        for stem, widths in (("causal_conv", convolved), (operator, dims)):
            full = f"{stem}_{name}"
            yield builder.layer(full, full, {**state_dims(part), **widths}, Partition.STATES)
