"""Latent attention (MLA): keys and values of all heads from one small vector a token.

New tokens unpack the latent vectors of their context into keys and values; a decoding token takes
its queries into the latent space instead and attends there ("absorbed"), as vLLM and SGLang do.
Source: DeepSeek-V2, section 2.1 and appendix C, 2024; vLLM, `model_executor/layers/attention/mla`.
"""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.lowering.batch_dims import dims_of, parts_of
from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.training_layer import training_projection
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.dims import LATENT
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindSpec,
    Place,
    Placed,
    RequestState,
    Weights,
)
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.models.quantization import StoredWeight
from foretoken.domain.units import Quantity

LATENT_MATRICES = {
    "latent": (
        *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"),
    )
}


def latent_weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    """Yield the weights of latent attention."""
    qk_head_dim = d["qk_nope_head_dim"] + d["qk_rope_head_dim"]
    q_width, rank = d["num_heads"] * qk_head_dim, d["q_lora_rank"]
    queries = rank * (model.hidden + q_width) if rank else model.hidden * q_width
    kv_width = d["num_heads"] * (d["qk_nope_head_dim"] + d["v_head_dim"])
    keys = model.hidden * (d["kv_lora_rank"] + d["qk_rope_head_dim"]) + d["kv_lora_rank"] * kv_width
    out = (1 + d["has_gate"]) * d["num_heads"] * d["v_head_dim"] * model.hidden
    yield Weights(total=queries + keys + out, part="latent")
    yield Weights(total=rank + d["kv_lora_rank"])


def latent_state(d: Dims, _tp: int) -> RequestState:
    """Return the vector of every token, which each rank holds whole."""
    return RequestState(token_elements=d["kv_lora_rank"] + d["qk_rope_head_dim"])


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    """Yield the operators of the layers' attention, or whole modules where the options say so.

    Operators that work on a prefill or on decoding sequences are there where the batch has any.
    Modules have compressed queries. Training unpacks keys and values as a prefill does, and keeps
    no cache.
    """
    mla = next(iter(parts))
    if mla["has_gate"]:
        dims = {"m": builder.shape.num_tokens, "n": mla["num_heads"] * mla["v_head_dim"]}
        dims["k"] = builder.model.hidden
        yield from _latent_projection(builder, "attn_gate_proj", dims, Partition.COLUMN)
    if builder.options.has_kv_cache and builder.options.mla_form == "module" and mla["q_lora_rank"]:
        yield from _modules(builder, mla)
        return
    yield from _inputs(builder, mla)
    yield from _prefill(builder, mla)
    yield from _decode(builder, mla)
    model = builder.model
    dims = {
        "m": builder.shape.num_tokens,
        "n": model.hidden,
        "k": mla["num_heads"] * mla["v_head_dim"],
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


def _inputs(builder: NodeBuilder, mla: LayerPart) -> Iterator[OperatorNode]:
    model, tokens = builder.model, builder.shape.num_tokens
    latent = mla["kv_lora_rank"] + mla["qk_rope_head_dim"]
    q_width = mla["num_heads"] * (mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"])
    # Every rank computes the low-rank inputs of all heads, queries and cache in one product.
    dims = {"m": tokens, "n": mla["q_lora_rank"] + latent, "k": model.hidden}
    yield from _latent_projection(builder, "attn_down_proj", dims, Partition.REPLICATED)
    if mla["q_lora_rank"]:
        dims = {"num_tokens": tokens, "hidden": mla["q_lora_rank"]}
        yield builder.layer("q_latent_norm", "rms_norm", dims)
    dims = {"m": tokens, "n": q_width, "k": mla["q_lora_rank"] or model.hidden}
    yield from _latent_projection(builder, "attn_q_proj", dims, Partition.COLUMN)
    dims = {"num_tokens": tokens, "hidden": mla["kv_lora_rank"]}
    yield builder.layer("kv_latent_norm", "rms_norm", dims)
    dims = {"num_tokens": tokens, "num_heads": mla["num_heads"], "num_kv_heads": 1}
    dims["head_dim"] = mla["qk_rope_head_dim"]
    if mla["has_rope"]:
        yield builder.layer("attn_rope", "rope", dims, Partition.QUERIES)
    if builder.options.has_kv_cache:
        # One vector is key and value: half of it each, as that operator counts.
        dims = {"num_tokens": tokens, "num_kv_heads": 1, "head_dim": latent // 2}
        yield builder.layer("kv_cache_write", "kv_cache_write", dims, variant=builder.kv_variant)


def _prefill(builder: NodeBuilder, mla: LayerPart) -> Iterator[OperatorNode]:
    prefill, num_heads = builder.shape.prefill, mla["num_heads"]
    if prefill is None:
        return
    width = num_heads * (mla["qk_nope_head_dim"] + mla["v_head_dim"])
    dims = {"m": prefill.kv_tokens, "n": width, "k": mla["kv_lora_rank"]}
    yield from _latent_projection(builder, "attn_kv_proj", dims, Partition.COLUMN)
    if builder.options.training is not None:
        # Every head's key is put together from its own part and the one that all share, and its
        # value moved out of the product that has both: parts read, whole ones written.
        # Source: Megatron-Core, `fusions/fused_mla_yarn_rope_apply.py`.
        moved = 2 * (mla["qk_nope_head_dim"] + mla["v_head_dim"]) + mla["qk_rope_head_dim"]
        dims = {"num_tokens": prefill.kv_tokens, "hidden": num_heads * moved // 2}
        yield builder.layer("attn_key_concat", "copy", dims, Partition.WIDTH)
    dims = {
        **dims_of(prefill),
        "num_heads": num_heads,
        "qk_nope_head_dim": mla["qk_nope_head_dim"],
        "qk_rope_head_dim": mla["qk_rope_head_dim"],
        "v_head_dim": mla["v_head_dim"],
    }
    # The keys and values are unpacked: in the model's own format, whatever the cache has.
    yield builder.layer("mla_prefill", "mla_prefill", dims, Partition.QUERIES)


def _decode(builder: NodeBuilder, mla: LayerPart) -> Iterator[OperatorNode]:
    decode, num_heads = builder.shape.decode, mla["num_heads"]
    if decode is None:
        return
    yield _absorbed(builder, mla, "mla_query_absorb", mla["kv_lora_rank"], mla["qk_nope_head_dim"])
    dims = {
        **dims_of(decode),
        "num_heads": num_heads,
        "kv_lora_rank": mla["kv_lora_rank"],
        "qk_rope_head_dim": mla["qk_rope_head_dim"],
    }
    variant = builder.kv_variant
    yield builder.layer("mla_decode", "mla_decode", dims, Partition.QUERIES, variant)
    yield _absorbed(builder, mla, "mla_value_unpack", mla["v_head_dim"], mla["kv_lora_rank"])


def _absorbed(
    builder: NodeBuilder, mla: LayerPart, role: str, width: int, depth: int
) -> OperatorNode:
    """Return a product of every head's own matrix, part of the weights that unpack the cache."""
    decode = builder.shape.decode
    rows = decode.num_seqs if decode else 0
    dims = {"batch": mla["num_heads"], "m": rows, "n": width, "k": depth}
    node = builder.layer(role, "batched_gemm", dims, Partition.QUERIES)
    # Engines multiply with them unquantised; they count once, as stored for the prefill if any.
    shares_weights = builder.shape.prefill is not None
    return dataclasses.replace(
        node, weight_bits=_weight(builder).bits, shares_weights=shares_weights
    )


# Dimensions of modules besides heads and the model's width.
_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _modules(builder: NodeBuilder, mla: LayerPart) -> Iterator[OperatorNode]:
    widths = module_widths(builder, mla)
    for index, (name, part) in enumerate(parts_of(builder.shape)):
        dims = {**dims_of(part), **widths}
        yield module_node(builder, f"mla_{name}_module", dims, is_first=index == 0)


def module_widths(builder: NodeBuilder, part: LayerPart) -> dict[str, Quantity]:
    """Return the dimensions of a module of latent attention that are of no batch."""
    widths = {name: part[name] for name in _WIDTHS}
    return {"num_heads": part["num_heads"], "hidden": builder.model.hidden, **widths}


def module_node(
    builder: NodeBuilder, operator: str, dims: dict[str, Quantity], *, is_first: bool
) -> OperatorNode:
    """Return a module from hidden state to hidden state; the first of a layer holds the weights."""
    weight = _weight(builder)
    node = builder.layer(operator, operator, dims, Partition.QUERIES)
    node = builder.stored(node, weight, **builder.block_formats(weight))
    return dataclasses.replace(node, shares_weights=not is_first)


KIND = KindSpec(
    name="latent",
    place=Place.MIXER,
    summary="latent attention over all tokens",
    source="DeepSeek-V2, 2024, section 2.1; Kimi K3's config.json (gate, no positions)",
    dims=LATENT,
    weights=latent_weights,
    state=latent_state,
    lower=_lower,
    rotary_dim=lambda d: d["has_rope"] * d["qk_rope_head_dim"],
    split_heads=("num_heads",),
    approximated="the gate of the output is multiplied in no time of its own",
    has_backward=True,
    matrices=LATENT_MATRICES,
)
