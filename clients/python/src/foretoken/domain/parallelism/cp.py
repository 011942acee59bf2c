"""Context parallelism: split every sequence over the ranks of a group.

By `ring` keys and values go around while each rank attends its queries to what has arrived: its own
block is causal; of each other rank's one half is seen by all its queries, or all by one half of
them. By `all_to_all` ranks exchange heads. All else runs on a rank's own tokens.
Source: Liu et al., "Ring Attention", 2023; the halves are those of Megatron-Core and
TransformerEngine, `context_parallel.py`.
"""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.communication import PlacedGroup, beside
from foretoken.domain.lowering.graph import OperatorNode, RankContext
from foretoken.domain.lowering.head_exchange import (
    ATTENTION_KERNELS,
    exchange_heads,
    head_dims,
    head_limits,
    num_key_heads,
)
from foretoken.domain.lowering.options import (
    LayoutCases,
    Lowering,
    Nodes,
    ParallelPass,
)
from foretoken.domain.lowering.placement import axis_group
from foretoken.domain.requests.limit import Limit

_EXCHANGES = ("ring", "all_to_all")


def _limits(cases: LayoutCases) -> Iterator[Limit]:
    cp, training = cases.cp, cases.training
    if training is None:
        yield Limit(
            "sequence",
            cp > 1,
            lambda: "splitting sequences is simulated for training alone; leave it at 1",
        )
        return
    num_pieces = cp * (1 + cases.is_isp * (cases.tp - 1)) * (1 + (cp > 1))
    yield Limit(
        "sequence",
        training.sequence_length % num_pieces != 0,
        lambda: (
            f"a sequence of {training.sequence_length} tokens is cut into {num_pieces} pieces,"
            " two for each rank of cp, and they must be alike"
        ),
    )
    yield Limit(
        "sequence",
        (cp > 1) & (training.context_parallel not in _EXCHANGES),
        lambda: f"context_parallel must be one of {', '.join(_EXCHANGES)}",
    )
    trainer = training.trainer
    yield Limit(
        "heads",
        (cp > 1) & (trainer.attention != "flash"),
        lambda: f"{trainer.name} computes attention by whole rows of scores; leave it at 1",
    )
    if training.context_parallel == "all_to_all":
        yield from head_limits(cases, cases.tp * cp, cp > 1)


def _rewrite(nodes: Nodes, lowering: Lowering) -> Nodes:
    rank, training = lowering.rank, lowering.options.training
    if rank.layout.cp == 1 or training is None:
        return nodes
    if training.context_parallel == "all_to_all":
        return exchange_heads(nodes, rank, axis_group(rank.layout, "cp"))
    is_hidden = training.trainer.overlaps_context_exchange
    return tuple(part for node in nodes for part in _ring(node, rank, is_hidden=is_hidden))


def _ring(node: OperatorNode, rank: RankContext, *, is_hidden: bool) -> Iterator[OperatorNode]:
    if node.operator not in ATTENTION_KERNELS:
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
        yield beside(send, kernel.role, is_hidden=is_hidden)
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


PASS = ParallelPass(axis="cp", limits=_limits, rewrite=_rewrite)
