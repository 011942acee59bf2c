"""Attention with key and value heads, over everything before a token or over a window of it."""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.graph import DecodeShape, OperatorNode, Partition, PrefillShape
from foretoken.domain.lowering.node_builder import EAGER_VARIANT, NodeBuilder
from foretoken.domain.lowering.training_layer import (
    is_unfused,
    lower_unfused_attention,
    trainer_of,
    training_projection,
)
from foretoken.domain.units import Quantity, ceil_divide, smaller


def lower_attention(builder: NodeBuilder) -> Iterator[OperatorNode]:
    """Yield projections, rotation, cache and attention of every layer."""
    model, tokens = builder.model, builder.shape.num_tokens
    q_width = model.num_heads * model.head_dim
    kv_width = model.num_kv_heads * model.head_dim
    dims = {"m": tokens, "n": q_width + 2 * kv_width, "k": model.hidden}
    yield from _projection(builder, "attn_qkv_proj", dims, Partition.QKV)
    if model.has_qk_norm:
        for role, num_heads in (("q_norm", model.num_heads), ("k_norm", model.num_kv_heads)):
            dims = {"num_tokens": tokens * num_heads, "hidden": model.head_dim}
            yield builder.layer(role, "rms_norm", dims, Partition.HEADS)
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
    if model.position == "rope":
        dims = {"num_tokens": tokens, **heads, "head_dim": model.head_dim}
        training = builder.options.training
        variant = EAGER_VARIANT if training and not training.trainer.fuses_rope else ""
        yield builder.layer("attn_rope", "rope", dims, Partition.HEADS, variant)
    if builder.options.has_kv_cache:
        dims = {"num_tokens": tokens, "num_kv_heads": model.num_kv_heads}
        dims["head_dim"] = model.head_dim
        variant = builder.kv_variant
        yield builder.layer("kv_cache_write", "kv_cache_write", dims, Partition.HEADS, variant)
    yield from _kernels(builder)
    dims = {"m": tokens, "n": model.hidden, "k": q_width}
    yield from _projection(builder, "attn_out_proj", dims, Partition.ROW)


def _projection(
    builder: NodeBuilder, role: str, dims: dict[str, Quantity], partition: Partition
) -> Iterator[OperatorNode]:
    if builder.options.training is None:
        yield builder.projection(role, dims, partition)
        return
    model = builder.model
    has_bias = model.has_bias or (model.has_qkv_bias and partition is Partition.QKV)
    # The bias of the output joins the residual stream, by a kernel of its own or with it.
    is_fused = partition is Partition.QKV or trainer_of(builder).fuses_residual
    for node in training_projection(builder, role, dims, partition):
        is_biased = has_bias and is_fused and node.operator == "gemm"
        yield dataclasses.replace(node, has_bias=is_biased)


def _kernels(builder: NodeBuilder) -> Iterator[OperatorNode]:
    model, shape = builder.model, builder.shape
    if shape.prefill is not None and is_unfused(builder):
        yield from lower_unfused_attention(builder, shape.prefill)
        return
    # Windows are a matter of serving: they have no backward pass here.
    has_windows = builder.options.has_kv_cache and model.full_attention_period != 1
    window = model.sliding_window if has_windows else 0
    period = model.full_attention_period if window else 0
    for part, name in ((shape.prefill, "prefill"), (shape.decode, "decode")):
        if part is None:
            continue
        if not window or period:
            node = _kernel(builder, f"attention_{name}", _dims_of(part))
            yield _every(node, period - 1, period)
        if window:
            node = _kernel(builder, f"attention_{name}_window", _window_dims(part, window))
            # All but the last layer of every period.
            for first in range(max(1, period - 1)):
                yield _every(node, first, period)


def _kernel(builder: NodeBuilder, operator: str, batch: dict[str, Quantity]) -> OperatorNode:
    model = builder.model
    dims = {
        **batch,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
    }
    node = builder.layer(operator, operator, dims, Partition.HEADS, builder.kv_variant)
    if builder.options.training is None:
        return node
    return dataclasses.replace(node, share=trainer_of(builder).attention_time_ratio)


def _every(node: OperatorNode, first: int, period: int) -> OperatorNode:
    """Return the node in one layer of every period, or in all layers without one."""
    if not period:
        return node
    count = max(0, int(ceil_divide(node.repeat - first, period)))
    return dataclasses.replace(node, first_layer=first, layer_stride=period, repeat=count)


def _dims_of(part: PrefillShape | DecodeShape) -> dict[str, Quantity]:
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def _window_dims(part: PrefillShape | DecodeShape, window: int) -> dict[str, Quantity]:
    """Return the batch as window operators see it, its sequences taken as equally long."""
    if isinstance(part, DecodeShape):
        visible = smaller(part.kv_tokens, part.num_seqs * window)
        return {**_dims_of(part), "visible_tokens": visible, "window": window}
    q_len = part.q_tokens // part.num_seqs
    context = (part.kv_tokens - part.q_tokens) // part.num_seqs
    # Tokens that still see all of their context; the others see a full window.
    in_window = smaller(_positive(window - context), q_len)
    pairs = in_window * context + in_window * (in_window + 1) // 2 + (q_len - in_window) * window
    return {
        "num_seqs": part.num_seqs,
        "q_tokens": part.q_tokens,
        "kv_tokens": part.q_tokens + part.num_seqs * smaller(context, window - 1),
        "score_pairs": part.num_seqs * pairs,
        "window": window,
    }


def _positive(value: Quantity) -> Quantity:
    return value - smaller(value, 0 * value)
