"""Hierarchical context parallelism: heads are exchanged within a node, keys and values go around.

The ranks of cp on a node, as many as divide the key heads that tp leaves, exchange tokens for
heads; groups of them are a ring. On a single node that is `all_to_all`, where tp fills one `ring`.
Source: TransformerEngine, `context_parallel.py` (`cp_comm_type="a2a+p2p"`) and Megatron-Core,
`--hierarchical-context-parallel-sizes`; Fang and Zhao, "USP: A Unified Sequence Parallelism", 2024.
"""

import dataclasses
from collections.abc import Iterator
from math import gcd

from foretoken.domain.lowering.communication import axis_group
from foretoken.domain.lowering.context_parallel import (
    ATTENTION_KERNELS,
    attend_in_ring,
    exchange_heads,
    num_key_heads,
)
from foretoken.domain.lowering.graph import OperatorNode, RankContext
from foretoken.domain.lowering.options import Lowering, Nodes, ParallelPass

_NAME = "hierarchical"


def _rewrite(nodes: Nodes, lowering: Lowering) -> Nodes:
    training = lowering.options.training
    if training is None or training.context_parallel != _NAME:
        return nodes
    is_hidden = training.trainer.overlaps_context_exchange
    return tuple(part for node in nodes for part in _cut(node, lowering.rank, is_hidden=is_hidden))


def _cut(node: OperatorNode, rank: RankContext, *, is_hidden: bool) -> Iterator[OperatorNode]:
    if node.operator not in ATTENTION_KERNELS:
        yield node
        return
    everyone = axis_group(rank.layout, "cp")
    on_node = everyone.dims(rank.devices_per_node)["devices_per_node"]
    inner = gcd(on_node, int(num_key_heads(node)))
    exchanged = exchange_heads((node,), rank, dataclasses.replace(everyone, degree=inner))
    # A ring passes over the ranks that exchange heads, as it does over those of tp.
    layout = dataclasses.replace(
        rank.layout, tp=rank.layout.tp * inner, cp=everyone.over(inner).degree
    )
    outer = dataclasses.replace(rank, layout=layout)
    yield from attend_in_ring(exchanged, outer, is_hidden=is_hidden)


PASS = ParallelPass(axis="hcp", rewrite=_rewrite)
