"""Pipeline parallelism: give each stage a run of layers, and pass activations between stages."""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering import Nodes, ParallelPass
from foretoken.domain.placement import neighbour_dims


def _check(rank: RankContext) -> Iterator[str]:
    if rank.layout.pp > rank.model.num_layers:
        yield f"more stages than the {rank.model.num_layers} layers of {rank.model.name}"


def _rewrite(nodes: Nodes, rank: RankContext) -> Nodes:
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
    first = max(node.first_layer, layers.start)
    last = min(node.first_layer + node.repeat, layers.stop)
    return dataclasses.replace(node, first_layer=first, repeat=max(0, last - first))


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
