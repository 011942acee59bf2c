"""Attention of grouped heads: over all tokens before, over a window of them, or inside chunks."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from foretoken.domain.lowering.batch_dims import chunk_dims, dims_of, parts_of, window_dims
from foretoken.domain.lowering.graph import OperatorNode, Partition, in_order
from foretoken.domain.lowering.node_builder import NodeBuilder, as_chain
from foretoken.domain.lowering.training_layer import (
    is_unfused,
    lower_gate,
    lower_unfused_attention,
    trainer_of,
    training_projection,
)
from foretoken.domain.models.architecture import ModelArchitecture
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
from foretoken.domain.units import Quantity

# Of `qk_norm`: none, one weight for the features of a head, one for those of all heads.
_HEAD_NORM, _LAYER_NORM = 1, 2


def value_dim(d: Dims) -> int:
    """Return the features of a value head."""
    return d["v_head_dim"] or d["head_dim"]


def _own_kv_heads(d: Dims) -> int:
    """Return the heads whose keys and values a layer computes and keeps itself."""
    return 0 if d["has_shared_kv"] else d["num_kv_heads"]


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    q_width = d["num_heads"] * d["head_dim"]
    num_kv_heads = _own_kv_heads(d)
    k_width, v_width = num_kv_heads * d["head_dim"], num_kv_heads * value_dim(d)
    num_values = 0 if d["has_value_of_key"] else v_width
    out_width = d["num_heads"] * value_dim(d)
    gate_width = {0: 0, 1: out_width, 2: d["num_heads"]}[d["gate"]]
    widths = q_width + k_width + num_values
    yield Weights(total=model.hidden * (widths + gate_width + out_width), part="attention")
    others = widths if d["has_qkv_bias"] else 0
    others += model.hidden if d["has_out_bias"] else 0
    num_normed = 1 + (not d["has_shared_kv"])
    others += {0: 0, _HEAD_NORM: num_normed * d["head_dim"], _LAYER_NORM: q_width + k_width}[
        d["qk_norm"]
    ]
    yield Weights(total=others + d["has_sinks"] * d["num_heads"])


def _state(d: Dims, tp: int) -> RequestState:
    if d["has_shared_kv"]:
        return RequestState()
    width = local_heads(d["num_kv_heads"], tp) * (d["head_dim"] + value_dim(d))
    reach = d["window"] or d["chunk"]
    if reach:
        return RequestState(window_elements=width, window_tokens=reach)
    return RequestState(token_elements=width)


def _check(d: Dims) -> Mapping[str, tuple[bool, str]]:
    return {
        "num_kv_heads": (
            d["num_heads"] % d["num_kv_heads"] == 0,
            f"{d['num_kv_heads']} must divide the {d['num_heads']} heads",
        ),
        "window": (not (d["window"] and d["chunk"]), "a layer has a window or chunks, not both"),
        "qk_norm": (d["qk_norm"] <= _LAYER_NORM, "must be 0, 1 or 2"),
        "gate": (d["gate"] <= 2, "must be 0, 1 or 2"),  # noqa: PLR2004 - the kinds of gate
    }


def lower_attention(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    """Yield projections, rotation, cache and attention of the layers."""
    d, tokens, hidden = next(iter(parts)), builder.shape.num_tokens, builder.model.hidden
    num_heads, num_kv_heads, head_dim = d["num_heads"], d["num_kv_heads"], d["head_dim"]
    v_dim = value_dim(d.dims)
    widths = _own_kv_heads(d.dims) * (head_dim + (0 if d["has_value_of_key"] else v_dim))
    kv_heads = (num_kv_heads, widths // num_kv_heads)
    gate_width = {0: 0, 1: num_heads * v_dim, 2: num_heads}[d["gate"]]
    dims = {"m": tokens, "n": num_heads * head_dim + gate_width + widths, "k": hidden}
    for node in _projection(builder, "attn_qkv_proj", dims, Partition.QKV, d["has_qkv_bias"]):
        yield dataclasses.replace(node, kv_heads=kv_heads)
    yield from _head_norms(builder, d)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    turning = in_order(layers for part, layers in parts.items() if part["has_rope"])
    if turning:
        dims = {"num_tokens": tokens, **heads, "head_dim": d["rotary_dim"] or head_dim}
        training = builder.options.training
        node = builder.layer("attn_rope", "rope", dims, Partition.HEADS).in_layers(turning)
        yield as_chain(node) if training and not training.trainer.fuses_rope else node
    if builder.options.has_kv_cache and not d["has_shared_kv"]:
        # Half of a key and a value together, which that operator counts twice.
        dims = {"num_tokens": tokens, "num_kv_heads": num_kv_heads}
        dims["head_dim"] = (head_dim + v_dim) // 2
        variant = builder.kv_variant
        yield builder.layer("kv_cache_write", "kv_cache_write", dims, Partition.HEADS, variant)
    yield from _kernels(builder, parts)
    if gate_width:
        yield from lower_gate(builder, num_heads * v_dim)
    dims = {"m": tokens, "n": hidden, "k": num_heads * v_dim}
    yield from _projection(builder, "attn_out_proj", dims, Partition.ROW, d["has_out_bias"])


def _head_norms(builder: NodeBuilder, d: LayerPart) -> Iterator[OperatorNode]:
    tokens, head_dim = builder.shape.num_tokens, d["head_dim"]
    for role, num_heads in (("q_norm", d["num_heads"]), ("k_norm", _own_kv_heads(d.dims))):
        if not num_heads:
            continue
        if d["qk_norm"] == _HEAD_NORM:
            dims = {"num_tokens": tokens * num_heads, "hidden": head_dim}
            node = builder.layer(role, "rms_norm", dims, Partition.HEADS)
            yield dataclasses.replace(node, kv_heads=(d["num_kv_heads"], head_dim))
        elif d["qk_norm"] == _LAYER_NORM:
            dims = {"num_tokens": tokens, "hidden": num_heads * head_dim}
            yield builder.layer(f"{role}_of_all", "rms_norm", dims, Partition.WIDTH)


def _projection(
    builder: NodeBuilder,
    role: str,
    dims: dict[str, Quantity],
    partition: Partition,
    has_bias: int,
) -> Iterator[OperatorNode]:
    if builder.options.training is None:
        yield builder.projection(role, dims, partition, builder.quantization.attention)
        return
    # The bias of the output joins the residual stream, by a kernel of its own or with it.
    is_fused = partition is Partition.QKV or trainer_of(builder).fuses_residual
    for node in training_projection(builder, role, dims, partition):
        is_biased = bool(has_bias) and is_fused and node.operator == "gemm"
        yield dataclasses.replace(node, has_bias=is_biased)


def _kernels(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    shape, d = builder.shape, next(iter(parts))
    if shape.prefill is not None and is_unfused(builder):
        yield from lower_unfused_attention(builder, shape.prefill, d)
        return
    reaches: dict[tuple[int, int], list[Sequence[int]]] = {}
    for part, held in parts.items():
        reaches.setdefault(_reach(builder, part), []).append(held)
    for name, batch in parts_of(shape):
        for (window, chunk), layers in sorted(reaches.items()):
            dims = chunk_dims(batch, chunk) if chunk else dims_of(batch)
            node = _kernel(builder, d, f"attention_{name}", dims)
            if window:
                dims = window_dims(batch, window)
                node = _kernel(builder, d, f"attention_{name}_window", dims)
            yield node.in_layers(in_order(layers))


def _reach(builder: NodeBuilder, part: LayerPart) -> tuple[int, int]:
    """Return the tokens that a query sees of those before it, and those of its chunk; 0 for all.

    What is served of a chunk is a window of half of it, as a query sees on average; in training,
    whose sequences are whole, chunks are sequences of their own, and what reaches over all of one
    is no limit.
    """
    training = builder.options.training
    if training is None:
        is_cached = builder.options.has_kv_cache
        return (part["window"] or -(-part["chunk"] // 2) if is_cached else 0), 0
    length = training.sequence_length
    return part["window"] * (part["window"] < length), part["chunk"] * (part["chunk"] < length)


def _kernel(
    builder: NodeBuilder, d: LayerPart, operator: str, batch: dict[str, Quantity]
) -> OperatorNode:
    dims = {
        **batch,
        "num_heads": d["num_heads"],
        "num_kv_heads": d["num_kv_heads"],
        "head_dim": (d["head_dim"] + value_dim(d.dims)) // 2,
    }
    node = builder.layer(operator, operator, dims, Partition.HEADS, builder.kv_variant)
    if builder.options.training is None:
        return node
    return dataclasses.replace(node, share=trainer_of(builder).attention_time_ratio)


KIND = KindSpec(
    name="attention",
    place=Place.MIXER,
    summary="softmax attention of grouped heads, over all tokens, a window or a chunk",
    source="Ainslie et al., GQA, 2023; Mistral 7B, 2023 (windows); Llama 4's modelling file in"
    " transformers 5 (chunks, layers without positions); Gemma 4's (keys that are values)",
    dims=(
        *HEADS,
        KindDim("v_head_dim", "features of a value head; 0: as a key's", 0),
        KindDim("window", "tokens a query sees, itself included; 0: all", 0),
        KindDim("chunk", "a query sees its own chunk of so many tokens; 0: all", 0),
        KindDim("has_rope", "1: queries and keys turn with their position", 1),
        KindDim("rotary_dim", "features of a head that turn; 0: all", 0),
        KindDim("has_qkv_bias", "1: queries, keys and values have a bias", 0),
        KindDim("has_out_bias", "1: the output projection has a bias", 0),
        KindDim("qk_norm", "norm of queries and keys; 1: by head, 2: over all heads", 0),
        KindDim("gate", "gate of the output; 1: of every feature, 2: of every head", 0),
        KindDim("has_value_of_key", "1: values are the keys, without a projection", 0),
        KindDim("has_sinks", "1: a learned logit for each head joins the softmax", 0),
        KindDim("has_shared_kv", "1: keys and values are those of an earlier layer", 0),
    ),
    weights=_weights,
    state=_state,
    check=_check,
    lower=lower_attention,
    rotary_dim=lambda d: d["has_rope"] * (d["rotary_dim"] or d["head_dim"]),
    split_heads=("num_heads",),
    approximated="chunks run as windows of half a chunk where they are served, what a query sees of"
    " one on average; sinks, slopes of ALiBi, served output gates, partial rotation, norms behind"
    " halves of layers (Gemma, GLM-4, OLMo): no time of their own; where keys are an earlier"
    " layer's, queries turn as both do",
    backward="Dao, FlashAttention-2, 2023, section 3.1: five products of scores for two, also in"
    " windows",
    varying=("window", "chunk", "has_rope", "has_sinks"),
    matrices={"attention": ("self_attn.q_proj", "self_attn.o_proj")},
)
