"""Attention of grouped heads to the blocks that an indexer scores highest (MSA of MiniMax-M3)."""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.batch_dims import parts_of, selected_dims
from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.indexer import lower_indexer
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.attention import lower_attention
from foretoken.domain.models.kinds.spec.dims import HEADS, INDEXER, local_heads
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    Placed,
    RequestState,
    Weights,
)
from foretoken.domain.models.layer import LayerPart


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    q_width, kv_width = d["num_heads"] * d["head_dim"], d["num_kv_heads"] * d["head_dim"]
    index = (d["index_heads"] + 1) * d["index_head_dim"]
    yield Weights(total=model.hidden * (2 * (q_width + kv_width) + index), part="attention")
    yield Weights(total=2 * d["head_dim"] + 2 * d["index_head_dim"])


def _state(d: Dims, tp: int) -> RequestState:
    kv_width = 2 * local_heads(d["num_kv_heads"], tp) * d["head_dim"]
    return RequestState(token_elements=kv_width + d["index_head_dim"])


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part, weight = next(iter(parts)), builder.quantization.attention
    if builder.options.training is not None:
        yield from _train(builder, part)
        return
    widths = {
        **{name: part[name] for name in ("num_heads", "num_kv_heads", "head_dim")},
        "hidden": builder.model.hidden,
        "index_num_heads": part["index_heads"],
        "index_head_dim": part["index_head_dim"],
        "block_size": part["block_size"],
        "topk_blocks": part["index_topk"],
    }
    for index, (name, batch) in enumerate(parts_of(builder.shape)):
        dims = {**selected_dims(batch, part["index_topk"] * part["block_size"]), **widths}
        operator = f"msa_{name}_module"
        node = builder.layer(operator, operator, dims, Partition.HEADS)
        node = builder.stored(node, weight, **builder.block_formats(weight))
        yield dataclasses.replace(node, shares_weights=index > 0)


def _train(builder: NodeBuilder, part: LayerPart) -> Iterator[OperatorNode]:
    """Yield trained layers: attention in a window as wide as the chosen blocks, and the indexer."""
    heads = {name: part[name] for name in ("num_heads", "num_kv_heads", "head_dim")}
    window = part["index_topk"] * part["block_size"]
    attention = LayerPart(kind="attention", dims={**heads, "qk_norm": 1, "window": window})
    yield from lower_attention(builder, {attention: tuple(builder.layers)})
    width = (part["index_heads"] + 1) * part["index_head_dim"]
    yield from lower_indexer(builder, part, {"index_key_proj": (width, builder.model.hidden)})


KIND = KindSpec(
    name="block_sparse",
    place=Place.MIXER,
    summary="attention of grouped heads to the blocks that an indexer picks (MSA)",
    source="MiniMax-M3's config.json (`sparse_attention_config`) and modelling file in"
    " transformers 5",
    dims=(*HEADS, *INDEXER, KindDim("block_size", "tokens of a block", minimum=1)),
    weights=_weights,
    state=_state,
    lower=_lower,
    rotary_dim=lambda d: d["head_dim"],
    split_heads=("num_heads",),
    approximated="trained attention to chosen blocks takes the time of a window of as many tokens;"
    " choosing them takes none",
    backward="as attention in a window; the indexer's scores as attention: DeepSeek-V3.2,"
    " section 2.1.1",
    whole_sequences="an indexer may choose blocks of any rank",
    matrices={"attention": ("self_attn.q_proj", "self_attn.o_proj")},
)
