"""What layers with a recurrent state have in common: operators of the state, the way out."""

from collections.abc import Iterator, Mapping

from foretoken.domain.lowering.batch_dims import parts_of, state_dims
from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.training_layer import project


def lower_states(builder: NodeBuilder, **widths: Mapping[str, int]) -> Iterator[OperatorNode]:
    """Yield operators over a request's state, of the prefilling and then of the decoding part.

    `widths` are, by the names of operators in their order, their dimensions that are of no batch:
    `causal_conv={"channels": 8192, "kernel_size": 4}`.
    """
    for name, part in parts_of(builder.shape):
        for stem, sizes in widths.items():
            full = f"{stem}_{name}"
            yield builder.layer(full, full, {**state_dims(part), **sizes}, Partition.STATES)


def lower_output(builder: NodeBuilder, width: int) -> Iterator[OperatorNode]:
    """Yield the product that takes a mixer's `width` features back to the hidden ones."""
    dims = {"m": builder.shape.num_tokens, "n": builder.model.hidden, "k": width}
    stored = builder.quantization.weight_of("recurrent")
    yield from project(builder, "attn_out_proj", dims, Partition.ROW, stored)
