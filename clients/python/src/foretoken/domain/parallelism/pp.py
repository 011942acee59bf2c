"""Pipeline parallelism: give each stage a run of layers, and pass activations between stages."""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering import Lowering, Nodes, ParallelPass
from foretoken.domain.placement import neighbour_dims


def _check(rank: RankContext) -> Iterator[str]:
    if rank.layout.pp > rank.model.num_layers:
        yield f"more stages than the {rank.model.num_layers} layers of {rank.model.name}"


def _rewrite(nodes: Nodes, lowering: Lowering) -> Nodes:
    rank = lowering.rank
    if rank.layout.pp == 1:
        return nodes
    cut = (_cut(node, rank) for node in nodes if _is_on_stage(node, rank))
    kept = [node for node in cut if node.repeat > 0]
    if not rank.is_last_stage:
        kept.append(_boundary(nodes, rank))
    return tuple(kept)


def _is_on_stage(node: OperatorNode, rank: RankContext) -> bool:
    if node.section is Section.EMBEDDING:
        return rank.stage == 0
    if node.section is Section.HEAD:
        return rank.is_last_stage
    return True


def _cut(node: OperatorNode, rank: RankContext) -> OperatorNode:
    if node.section is Section.HEAD and rank.stage > 0:
        # Away from the embedding, a tied head needs a copy of its weights.
        return dataclasses.replace(node, shares_weights=False)
    if node.section is not Section.LAYER:
        return node
    layers = rank.stage_layers
    stride = node.layer_stride
    all_layers = range(node.first_layer, node.first_layer + node.repeat * stride, stride)
    kept = [layer for layer in all_layers if layer in layers]
    first = kept[0] if kept else node.first_layer
    return dataclasses.replace(node, first_layer=first, repeat=len(kept))


def _boundary(nodes: Nodes, rank: RankContext) -> OperatorNode:
    norm = next(node for node in nodes if node.role == "input_norm")
    message_bytes = norm.dtype.bytes_of(norm.dims["num_tokens"] * rank.model.hidden)
    return OperatorNode(
        role="stage_send",
        group="collective",
        section=Section.BOUNDARY,
        operator="send_recv",
        dims={
            "message_bytes": message_bytes,
            **neighbour_dims(rank.layout, "pp", rank.devices_per_node),
        },
        dtype=norm.dtype,
    )


PASS = ParallelPass(axis="pp", check=_check, rewrite=_rewrite)
