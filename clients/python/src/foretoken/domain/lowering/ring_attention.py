"""Send keys and values around while each rank attends its queries to what has arrived.

Its own block is causal; of each other rank's one half is seen by all its queries, or all by one
half of them.
Source: Liu et al., "Ring Attention", 2023; the halves are those of Megatron-Core and
TransformerEngine, `context_parallel.py`.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from foretoken.domain.lowering.communication import PlacedGroup, overlapped_with
from foretoken.domain.lowering.graph import OperatorNode, RankContext
from foretoken.domain.lowering.head_exchange import ATTENTION_KERNELS, head_dims, num_key_heads


def attend_in_ring(
    nodes: Sequence[OperatorNode], rank: RankContext, *, is_hidden: bool
) -> tuple[OperatorNode, ...]:
    """Return the graph with the attention of every layer in a ring over the cp of a rank's layout.

    Sending is concurrent with attention to what has arrived where it `is_hidden`.
    """
    return tuple(part for node in nodes for part in _ring(node, rank, is_hidden=is_hidden))


def _ring(node: OperatorNode, rank: RankContext, *, is_hidden: bool) -> Iterator[OperatorNode]:
    if node.operator not in ATTENTION_KERNELS or rank.layout.cp == 1:
        yield node
        return
    group = PlacedGroup.of_neighbours("cp", rank)
    key_dim, value_dim = head_dims(node)
    elements = node.dims["kv_tokens"] * num_key_heads(node) * (key_dim + value_dim)
    message_bytes = node.dtype.bytes_of(elements)
    kernel = node
    for index in range(1, rank.layout.cp):
        role = f"{node.role}_ring_send_{index}"
        send = group.collective(node, role, "send_recv", message_bytes)
        yield overlapped_with(send, kernel.role, is_hidden=is_hidden)
        yield kernel
        kernel = _other_block(node, index)
    yield kernel
    # Every further block's output is added to the sum, scaled by both softmax denominators.
    dims = {
        "num_tokens": node.dims["q_tokens"] * (rank.layout.cp - 1),
        "hidden": node.dims["num_heads"] * value_dim,
    }
    yield dataclasses.replace(
        node,
        role=f"{node.role}_ring_merge",
        group="elementwise",
        operator="residual_add",
        dims=dims,
        variant="",
    )


def _other_block(node: OperatorNode, index: int) -> OperatorNode:
    num_seqs = node.dims["num_seqs"]
    half = node.dims["q_tokens"] // num_seqs // 2
    dims = {
        **node.dims,
        "q_tokens": num_seqs * half,
        "kv_tokens": num_seqs * 2 * half,
        "score_pairs": num_seqs * 2 * half * half,
    }
    return dataclasses.replace(node, role=f"{node.role}_ring_{index}", dims=dims)
