"""Attention: over all tokens before, over a window, or from a small latent vector a token.

New tokens unpack the latent vectors of their context into keys and values; a decoding token takes
its queries into the latent space instead and attends there ("absorbed"), as vLLM and SGLang do.
Source: DeepSeek-V2, section 2.1 and appendix C, 2024; vLLM, `model_executor/layers/attention/mla`.
"""

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
from foretoken.domain.models.architecture import MlaSpec
from foretoken.domain.models.quantization import StoredWeight
from foretoken.domain.operators.attention_decode_window import most_visible
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
        yield builder.projection(role, dims, partition, builder.quantization.attention)
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
    """Return the batch as window operators see it, sequences but the longest as equally long."""
    if isinstance(part, DecodeShape):
        dims = {**_dims_of(part), "window": window}
        return {**dims, "visible_tokens": most_visible(dims)}
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


def lower_latent_attention(builder: NodeBuilder, mla: MlaSpec) -> Iterator[OperatorNode]:
    """Yield the operators of every layer's attention, or whole modules where the options say so.

    Operators that work on a prefill or on decoding sequences are there where the batch has any.
    Modules have compressed queries. Training unpacks keys and values as a prefill does, and keeps
    no cache.
    """
    if builder.options.has_kv_cache and builder.options.mla_form == "module" and mla.q_lora_rank:
        yield from _modules(builder, mla)
        return
    yield from _inputs(builder, mla)
    yield from _prefill(builder, mla)
    yield from _decode(builder, mla)
    model = builder.model
    dims = {
        "m": builder.shape.num_tokens,
        "n": model.hidden,
        "k": model.num_heads * mla.v_head_dim,
    }
    yield from _latent_projection(builder, "attn_out_proj", dims, Partition.ROW)


def _weight(builder: NodeBuilder) -> StoredWeight:
    return builder.quantization.weight_of("latent")


def _latent_projection(
    builder: NodeBuilder, role: str, dims: dict[str, Quantity], partition: Partition
) -> Iterator[OperatorNode]:
    if builder.options.training is not None:
        yield from training_projection(builder, role, dims, partition)
    else:
        yield builder.projection(role, dims, partition, _weight(builder))


def _inputs(builder: NodeBuilder, mla: MlaSpec) -> Iterator[OperatorNode]:
    model, tokens = builder.model, builder.shape.num_tokens
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    q_width = model.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    # Every rank computes the low-rank inputs of all heads, queries and cache in one product.
    dims = {"m": tokens, "n": mla.q_lora_rank + latent, "k": model.hidden}
    yield from _latent_projection(builder, "attn_down_proj", dims, Partition.REPLICATED)
    if mla.q_lora_rank:
        dims = {"num_tokens": tokens, "hidden": mla.q_lora_rank}
        yield builder.layer("q_latent_norm", "rms_norm", dims)
    dims = {"m": tokens, "n": q_width, "k": mla.q_lora_rank or model.hidden}
    yield from _latent_projection(builder, "attn_q_proj", dims, Partition.COLUMN)
    dims = {"num_tokens": tokens, "hidden": mla.kv_lora_rank}
    yield builder.layer("kv_latent_norm", "rms_norm", dims)
    dims = {"num_tokens": tokens, "num_heads": model.num_heads, "num_kv_heads": 1}
    dims["head_dim"] = mla.qk_rope_head_dim
    yield builder.layer("attn_rope", "rope", dims, Partition.QUERIES)
    if builder.options.has_kv_cache:
        # One vector is key and value: half of it each, as that operator counts.
        dims = {"num_tokens": tokens, "num_kv_heads": 1, "head_dim": latent // 2}
        yield builder.layer("kv_cache_write", "kv_cache_write", dims, variant=builder.kv_variant)


def _prefill(builder: NodeBuilder, mla: MlaSpec) -> Iterator[OperatorNode]:
    prefill, num_heads = builder.shape.prefill, builder.model.num_heads
    if prefill is None:
        return
    width = num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    dims = {"m": prefill.kv_tokens, "n": width, "k": mla.kv_lora_rank}
    yield from _latent_projection(builder, "attn_kv_proj", dims, Partition.COLUMN)
    if builder.options.training is not None:
        # Every head's key is put together from its own part and the one that all share, and its
        # value moved out of the product that has both: parts read, whole ones written.
        # Source: Megatron-Core, `fusions/fused_mla_yarn_rope_apply.py`.
        moved = 2 * (mla.qk_nope_head_dim + mla.v_head_dim) + mla.qk_rope_head_dim
        dims = {"num_tokens": prefill.kv_tokens, "hidden": num_heads * moved // 2}
        yield builder.layer("attn_key_concat", "copy", dims, Partition.WIDTH)
    fields = {f.name: getattr(prefill, f.name) for f in dataclasses.fields(prefill)}
    dims = {
        **fields,
        "num_heads": num_heads,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }
    # The keys and values are unpacked: in the model's own format, whatever the cache has.
    yield builder.layer("mla_prefill", "mla_prefill", dims, Partition.QUERIES)


def _decode(builder: NodeBuilder, mla: MlaSpec) -> Iterator[OperatorNode]:
    decode, num_heads = builder.shape.decode, builder.model.num_heads
    if decode is None:
        return
    yield _absorbed(builder, "mla_query_absorb", mla.kv_lora_rank, mla.qk_nope_head_dim)
    fields = {f.name: getattr(decode, f.name) for f in dataclasses.fields(decode)}
    dims = {
        **fields,
        "num_heads": num_heads,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
    }
    variant = builder.kv_variant
    yield builder.layer("mla_decode", "mla_decode", dims, Partition.QUERIES, variant)
    yield _absorbed(builder, "mla_value_unpack", mla.v_head_dim, mla.kv_lora_rank)


def _absorbed(builder: NodeBuilder, role: str, width: int, depth: int) -> OperatorNode:
    """Return a product of every head's own matrix, part of the weights that unpack the cache."""
    decode = builder.shape.decode
    rows = decode.num_seqs if decode else 0
    dims = {"batch": builder.model.num_heads, "m": rows, "n": width, "k": depth}
    node = builder.layer(role, "batched_gemm", dims, Partition.QUERIES)
    # Engines multiply with them unquantised; they count once, as stored for the prefill if any.
    shares_weights = builder.shape.prefill is not None
    return dataclasses.replace(
        node, weight_bits=_weight(builder).bits, shares_weights=shares_weights
    )


def _modules(builder: NodeBuilder, mla: MlaSpec) -> Iterator[OperatorNode]:
    model, shape, weight = builder.model, builder.shape, _weight(builder)
    widths = {
        "num_heads": model.num_heads,
        "hidden": model.hidden,
        **{field.name: getattr(mla, field.name) for field in dataclasses.fields(mla)},
    }
    own = builder.options.dtype
    facts = {
        "attn": "" if weight.dtype in (None, own) else own.name.lower(),
        "kv": builder.kv_format,
    }
    is_first = True
    for part, name in ((shape.prefill, "prefill"), (shape.decode, "decode")):
        if part is None:
            continue
        fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
        operator = f"mla_{name}_module"
        node = builder.layer(operator, operator, {**fields, **widths}, Partition.QUERIES)
        yield dataclasses.replace(
            builder.stored(node, weight, **facts), shares_weights=not is_first
        )
        is_first = False
