"""Multi-head latent attention: keys and values of all heads from one small vector per token.

New tokens unpack the latent vectors of their context into keys and values; a decoding token takes
its queries into the latent space instead and attends there ("absorbed"), as vLLM and SGLang do.
Source: DeepSeek-V2, section 2.1 and appendix C, 2024; vLLM, `model_executor/layers/attention/mla`.
"""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.training_layer import training_projection
from foretoken.domain.models.architecture import MlaSpec
from foretoken.domain.models.quantization import StoredWeight
from foretoken.domain.units import Quantity


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
    yield from _projection(builder, "attn_out_proj", dims, Partition.ROW)


def _weight(builder: NodeBuilder) -> StoredWeight:
    scheme = builder.quantization
    return scheme.dense if scheme.latent is None else scheme.latent


def _projection(
    builder: NodeBuilder, role: str, dims: dict[str, Quantity], partition: Partition
) -> Iterator[OperatorNode]:
    if builder.options.training is not None:
        yield from training_projection(builder, role, dims, partition)
    else:
        yield builder.stored(builder.layer(role, "gemm", dims, partition), _weight(builder))


def _inputs(builder: NodeBuilder, mla: MlaSpec) -> Iterator[OperatorNode]:
    model, tokens = builder.model, builder.shape.num_tokens
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    q_width = model.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    # Every rank computes the low-rank inputs of all heads, queries and cache in one product.
    dims = {"m": tokens, "n": mla.q_lora_rank + latent, "k": model.hidden}
    yield from _projection(builder, "attn_down_proj", dims, Partition.REPLICATED)
    if mla.q_lora_rank:
        dims = {"num_tokens": tokens, "hidden": mla.q_lora_rank}
        yield builder.layer("q_latent_norm", "rms_norm", dims)
    dims = {"m": tokens, "n": q_width, "k": mla.q_lora_rank or model.hidden}
    yield from _projection(builder, "attn_q_proj", dims, Partition.COLUMN)
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
    yield from _projection(builder, "attn_kv_proj", dims, Partition.COLUMN)
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
