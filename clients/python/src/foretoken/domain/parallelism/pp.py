"""Pipeline parallelism: give each stage a run of layers, and pass activations between stages.

In training a rank may hold several runs, the next one on the next rank and after the last rank on
the first again.
"""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.communication import PlacedGroup, axis_group, neighbour_dims
from foretoken.domain.lowering.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering.options import (
    LayoutCases,
    Lowering,
    Nodes,
    ParallelPass,
    TrainingOptions,
)
from foretoken.domain.lowering.sequence_parallel import splits_tokens
from foretoken.domain.requests.limit import Limit


def _limits(cases: LayoutCases) -> Iterator[Limit]:
    layers, model, pp = cases.layers_by_stage, cases.model, cases.pp
    if not layers:
        yield Limit(
            "stages",
            pp > model.num_layers,
            lambda: f"more stages than the {model.num_layers} layers of {model.name}",
        )
        return
    yield Limit(
        "stages",
        sum(layers) != model.num_layers,
        lambda: f"the stages have {sum(layers)} layers and {model.name} has {model.num_layers}",
    )
    yield Limit("stages", min(layers) < 0, lambda: "a stage cannot have fewer than 0 layers")
    yield Limit(
        "stages",
        len(layers) % pp != 0,
        lambda: f"{len(layers)} stages do not divide over the {pp} ranks of the pipeline",
    )


def _rewrite(nodes: Nodes, lowering: Lowering) -> Nodes:
    rank = lowering.rank
    if rank.num_stages == 1:
        return nodes
    cut = (_cut(node, rank) for node in nodes if _is_on_stage(node, rank))
    kept = [node for node in cut if node.repeat > 0]
    training = lowering.options.training
    if rank.is_last_stage or rank.layout.pp == 1:
        return tuple(kept)
    if training is None:
        return (*kept, _boundary(nodes, rank))
    # The next stage may be on the first rank again.
    pp = rank.layout.pp
    pair = PlacedGroup.of_stages(rank.stage % pp, (rank.stage + 1) % pp, rank)
    return (*kept, *stage_transfers(_stream(nodes), pair, rank, training))


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
    kept = [layer for layer in node.layers if layer in layers]
    if node.places:
        return node.in_layers(kept)
    first = kept[0] if kept else node.first_layer
    return dataclasses.replace(node, first_layer=first, repeat=len(kept))


def _boundary(nodes: Nodes, rank: RankContext) -> OperatorNode:
    norm = _stream(nodes)
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
        axis="pp",
    )


def _stream(nodes: Nodes) -> OperatorNode:
    return next(node for node in nodes if node.role == "input_norm")


def stage_transfers(
    stream: OperatorNode, pair: PlacedGroup, rank: RankContext, training: TrainingOptions
) -> Iterator[OperatorNode]:
    """Yield what a stage in training sends to the next over `pair`, and how that is put together.

    `stream` is the norm at the beginning of a layer, which has what layers hand on; its dimensions
    are integers or columns.
    """
    trainer = training.trainer
    near = dataclasses.replace(
        stream, section=Section.BOUNDARY, repeat=1, first_layer=0, layer_stride=1, places=()
    )
    message_bytes = near.dtype.bytes_of(near.dims["num_tokens"] * rank.model.hidden)
    is_scattered = trainer.scatters_stage_transfers and rank.layout.tp > 1
    if is_scattered and not splits_tokens(rank, training):
        # Every rank of tp has the same, sends its share and gathers those of the others.
        sent = message_bytes // rank.layout.tp
        yield pair.collective(near, "stage_send", "send_recv", sent)
        group = PlacedGroup.of_rank(axis_group(rank.layout, "tp"), rank)
        yield group.collective(near, "stage_receive_all_gather", "all_gather", message_bytes)
    else:
        yield pair.collective(near, "stage_send", "send_recv", message_bytes)
    if trainer.sends_attention_mask:
        mask_bytes = near.dtype.bytes_of(training.sequence_length**2)
        yield pair.collective(near, "stage_send_mask", "send_recv", mask_bytes)


PASS = ParallelPass(axis="pp", limits=_limits, rewrite=_rewrite)
