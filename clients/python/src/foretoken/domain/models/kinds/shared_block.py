"""Attention and a feed-forward network whose weights several layers share (Zamba)."""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.attention import lower_attention
from foretoken.domain.models.kinds.mlp import lower_mlp
from foretoken.domain.models.kinds.spec.dims import HEADS, local_heads
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

# Its input has the hidden state and the embedding next to each other.
_INPUTS = 2


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    hidden, width = model.hidden, _INPUTS * model.hidden
    q_width, kv_width = (d[heads] * d["head_dim"] for heads in ("num_heads", "num_kv_heads"))
    attention = width * (q_width + 2 * kv_width) + q_width * hidden
    mlp = (2 + d["is_gated"]) * hidden * d["intermediate"]
    for part, total in (("attention", attention), ("mlp", mlp)):
        # A token passes through the shared weights in every layer: of all layers they count once.
        yield Weights(total=d["has_own_weights"] * total, part=part)
    # The norm that every half of a layer has is the second one.
    own = d["has_own_weights"] * width
    own += d["adapter_rank"] * (hidden + (1 + d["is_gated"]) * d["intermediate"])
    own += d["adapts_attention"] * 3 * 2 * width * d["adapter_rank"]
    yield Weights(total=own + hidden * hidden)


def _state(d: Dims, tp: int) -> RequestState:
    width = local_heads(d["num_kv_heads"], tp) * d["head_dim"]
    return RequestState(token_elements=2 * width)


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    ((part, layers),) = parts.items()
    tokens, hidden = builder.shape.num_tokens, builder.model.hidden
    width = _INPUTS * hidden
    wide = {"num_tokens": tokens, "hidden": width}
    yield builder.layer("block_input_concat", "copy", wide)
    yield builder.layer("block_input_norm", "rms_norm", wide)
    for node in _shared(builder, part, layers):
        dims = {**node.dims, "k": width} if node.role == "attn_qkv_proj" else node.dims
        yield dataclasses.replace(node, dims=dims, shares_weights=not part["has_own_weights"])
    rank, attended = part["adapter_rank"], 3 * width * part["adapts_attention"]
    for role, n, k in (
        ("block_attn_adapter_in", 3 * rank * part["adapts_attention"], width),
        ("block_attn_adapter_out", attended, rank),
        ("block_mlp_adapter_in", rank, hidden),
        ("block_mlp_adapter_out", (1 + part["is_gated"]) * part["intermediate"], rank),
        ("block_out_proj", hidden, hidden),
    ):
        if n and k:
            dims = {"m": tokens, "n": n, "k": k}
            partition = Partition.COLUMN if role.endswith("adapter_out") else Partition.REPLICATED
            yield builder.layer(role, "gemm", dims, partition)


def _shared(
    builder: NodeBuilder, part: LayerPart, layers: tuple[int, ...]
) -> Iterator[OperatorNode]:
    """Yield what the layers have the same weights of."""
    heads = ("num_heads", "num_kv_heads", "head_dim", "has_rope")
    attention = LayerPart(kind="attention", dims={name: part[name] for name in heads})
    yield from lower_attention(builder, {attention: layers})
    sizes = ("intermediate", "is_gated")
    mlp = LayerPart(kind="mlp", dims={name: part[name] for name in sizes})
    yield from lower_mlp(builder, {mlp: layers})


KIND = KindSpec(
    name="shared_block",
    place=Place.MIXER,
    summary="attention and a feed-forward network whose weights several layers share",
    source="Glorioso et al., Zamba, 2024; Zamba's and Zamba2's modelling files in transformers 5;"
    " vLLM, models/zamba2.py (the product behind it on every rank)",
    dims=(
        *HEADS,
        KindDim("intermediate", "features between the products of its network", minimum=1),
        KindDim("is_gated", "1: a gate next to the up projection", 1),
        KindDim("has_rope", "1: queries and keys turn with their position", 0),
        KindDim("adapter_rank", "rank of what a layer adds to the shared network; 0: nothing", 0),
        KindDim("adapts_attention", "1: queries, keys and values have such additions too", 0),
        KindDim("has_own_weights", "0: the weights are those of an earlier layer", 1),
    ),
    weights=_weights,
    state=_state,
    lower=_lower,
    rotary_dim=lambda d: d["has_rope"] * d["head_dim"],
    split_heads=("num_heads",),
    approximated="it is a layer of its own before the one that adds its output; a pipeline's stage"
    " without the first of the layers that share it is taken to need no copy of it",
    untrained="gradients that several layers add to the same weights are not known here",
)
