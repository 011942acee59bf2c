"""What an indexer runs in training: the projections of its queries and keys, and its scores.

It is trained to follow the attention it chooses for, so that its scores have gradients as those of
attention have. Source: DeepSeek-V3.2, 2025, section 2.1.1 (equations 3 and 4).
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.lowering.batch_dims import dims_of
from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.training_layer import training_projection
from foretoken.domain.models.layer import LayerPart


def lower_indexer(
    builder: NodeBuilder, part: LayerPart, projections: Mapping[str, tuple[int, int]]
) -> Iterator[OperatorNode]:
    """Yield an indexer of trained layers, which every rank of tp has whole.

    `projections` are its matrices by role, as features out and in. Its scores are the first of the
    two products of attention: heads of half the width have as many operations.
    """
    for role, (width, depth) in projections.items():
        dims = {"m": builder.shape.num_tokens, "n": width, "k": depth}
        yield from training_projection(builder, role, dims, Partition.REPLICATED)
    batch = builder.shape.prefill
    if batch is not None:
        heads = {"num_heads": part["index_heads"], "num_kv_heads": 1}
        dims = {**dims_of(batch), **heads, "head_dim": part["index_head_dim"] // 2}
        yield builder.layer("index_scores", "attention_prefill", dims)
