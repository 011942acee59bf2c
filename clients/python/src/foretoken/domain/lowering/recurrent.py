"""What layers with a recurrent state have in common: operators of the state, the way out."""

from collections.abc import Iterator, Mapping

from foretoken.domain.lowering.batch_dims import parts_of, state_dims
from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.training_layer import project


def lower_states(
    builder: NodeBuilder,
    *,
    role: str = "",
    partition: Partition = Partition.STATES,
    **widths: Mapping[str, int],
) -> Iterator[OperatorNode]:
    """Yield operators over a request's state, of the prefilling and then of the decoding part.

    `widths` are, by the names of operators in their order, their dimensions that are of no batch:
    `causal_conv={"channels": 8192, "kernel_size": 4}`. `role` is theirs in the layer where that has
    several of one operator (empty: they are named as the operators).
    """
    for name, part in parts_of(builder.shape):
        for stem, sizes in widths.items():
            dims = {**state_dims(part), **sizes}
            yield builder.layer(f"{role or stem}_{name}", f"{stem}_{name}", dims, partition)


def lower_output(builder: NodeBuilder, width: int) -> Iterator[OperatorNode]:
    """Yield the product that takes a mixer's `width` features back to the hidden ones."""
    dims = {"m": builder.shape.num_tokens, "n": builder.model.hidden, "k": width}
    stored = builder.quantization.weight_of("recurrent")
    yield from project(builder, "attn_out_proj", dims, Partition.ROW, stored)
