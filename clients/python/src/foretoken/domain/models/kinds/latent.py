"""Latent attention (MLA): keys and values of all heads from one small vector a token.

New tokens unpack the latent vectors of their context into keys and values; a decoding token takes
its queries into the latent space instead and attends there ("absorbed"), as vLLM and SGLang do.
Source: DeepSeek-V2, section 2.1 and appendix C, 2024; vLLM, `model_executor/layers/attention/mla`.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from foretoken.domain.lowering.batch_dims import dims_of, parts_of
from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder, as_chain
from foretoken.domain.lowering.training_layer import lower_gate, project, trainer_of
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

# The turned parts of queries and keys are taken out, sorted, turned one after the other and put
# back. Source: Megatron-Core 0.16, `multi_latent_attention.py` and `rope_utils.py`, run on a CPU
# with every operator of PyTorch counted that launches a kernel, but for the copy of keys.
_ROPE_KERNELS = (28, 30)
# Of `has_gate`: a product of queries and gates from the compressed query before and after its norm.
_QUERY_GATE = 2


def _query_gate_width(d: Dims) -> int:
    """Return the width of what that product has more than one of queries, with a rank of one."""
    return d["num_heads"] * (d["qk_nope_head_dim"] + d["qk_rope_head_dim"] + 2 * d["v_head_dim"])


def latent_check(d: Dims) -> Mapping[str, tuple[bool, str]]:
    """Return what gates latent attention can have."""
    is_of_queries = d["has_gate"] == _QUERY_GATE
    return {
        "has_gate": (d["has_gate"] <= _QUERY_GATE, "must be 0, 1 or 2"),
        "q_lora_rank": (not is_of_queries or d["q_lora_rank"] > 0, "required by a gate of queries"),
    }


def latent_weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    """Yield the weights of latent attention."""
    qk_head_dim = d["qk_nope_head_dim"] + d["qk_rope_head_dim"]
    q_width, rank = d["num_heads"] * qk_head_dim, d["q_lora_rank"]
    queries = rank * (model.hidden + q_width) if rank else model.hidden * q_width
    kv_width = d["num_heads"] * (d["qk_nope_head_dim"] + d["v_head_dim"])
    keys = model.hidden * (d["kv_lora_rank"] + d["qk_rope_head_dim"]) + d["kv_lora_rank"] * kv_width
    out = d["num_heads"] * d["v_head_dim"] * model.hidden
    gate = (model.hidden if d["has_gate"] else 0) * d["num_heads"] * d["v_head_dim"]
    if d["has_gate"] == _QUERY_GATE:
        gate = rank * _query_gate_width(d)
    yield Weights(total=queries + keys + out + gate, part="latent")
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
    yield from latent_gate(builder, mla)
    if builder.options.has_kv_cache and builder.options.mla_form == "module" and mla["q_lora_rank"]:
        yield from _modules(builder, mla)
        return
    yield from latent_inputs(builder, mla)
    yield from latent_prefill(builder, mla)
    yield from _decode(builder, mla)
    yield from latent_output(builder, mla)


def latent_gate(builder: NodeBuilder, mla: LayerPart) -> Iterator[OperatorNode]:
    """Yield the projection of the output's gate, where there is one."""
    if mla["has_gate"]:
        dims = {"m": builder.shape.num_tokens, "n": mla["num_heads"] * mla["v_head_dim"]}
        dims["k"] = builder.model.hidden
        if mla["has_gate"] == _QUERY_GATE:
            dims |= {"n": _query_gate_width(mla.dims), "k": mla["q_lora_rank"]}
        yield from latent_projection(builder, "attn_gate_proj", dims, Partition.COLUMN)


def latent_output(builder: NodeBuilder, mla: LayerPart) -> Iterator[OperatorNode]:
    """Yield what latent attention ends with: the gate where there is one, and the projection."""
    width = mla["num_heads"] * mla["v_head_dim"]
    if mla["has_gate"]:
        yield from lower_gate(builder, width)
    dims = {"m": builder.shape.num_tokens, "n": builder.model.hidden, "k": width}
    yield from latent_projection(builder, "attn_out_proj", dims, Partition.ROW)


def _weight(builder: NodeBuilder) -> StoredWeight:
    return builder.quantization.weight_of("latent")


def latent_projection(
    builder: NodeBuilder, role: str, dims: dict[str, Quantity], partition: Partition
) -> Iterator[OperatorNode]:
    """Yield a matrix product of latent attention, its weights stored as those are."""
    yield from project(builder, role, dims, partition, _weight(builder))


def latent_inputs(builder: NodeBuilder, mla: LayerPart) -> Iterator[OperatorNode]:
    """Yield what brings tokens to queries and latent vectors, and these into the cache."""
    model, tokens = builder.model, builder.shape.num_tokens
    latent = mla["kv_lora_rank"] + mla["qk_rope_head_dim"]
    q_width = mla["num_heads"] * (mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"])
    # Every rank computes the low-rank inputs of all heads, queries and cache in one product.
    dims = {"m": tokens, "n": mla["q_lora_rank"] + latent, "k": model.hidden}
    yield from latent_projection(builder, "attn_down_proj", dims, Partition.REPLICATED)
    if mla["q_lora_rank"]:
        dims = {"num_tokens": tokens, "hidden": mla["q_lora_rank"]}
        yield builder.layer("q_latent_norm", "rms_norm", dims)
    dims = {"m": tokens, "n": q_width, "k": mla["q_lora_rank"] or model.hidden}
    yield from latent_projection(builder, "attn_q_proj", dims, Partition.COLUMN)
    dims = {"num_tokens": tokens, "hidden": mla["kv_lora_rank"]}
    yield builder.layer("kv_latent_norm", "rms_norm", dims)
    dims = {"num_tokens": tokens, "num_heads": mla["num_heads"], "num_kv_heads": 1}
    dims["head_dim"] = mla["qk_rope_head_dim"]
    if mla["has_rope"]:
        node = builder.layer("attn_rope", "rope", dims, Partition.QUERIES)
        if not trainer_of(builder).fuses_rope:
            node = dataclasses.replace(as_chain(node), num_kernels=_ROPE_KERNELS)
        yield node
    if builder.options.has_kv_cache:
        # One vector is key and value: half of it each, as that operator counts.
        dims = {"num_tokens": tokens, "num_kv_heads": 1, "head_dim": latent // 2}
        yield builder.layer("kv_cache_write", "kv_cache_write", dims, variant=builder.kv_variant)


def latent_prefill(builder: NodeBuilder, mla: LayerPart) -> Iterator[OperatorNode]:
    """Yield the attention of new tokens over all tokens before, keys and values unpacked."""
    prefill, num_heads = builder.shape.prefill, mla["num_heads"]
    if prefill is None:
        return
    width = num_heads * (mla["qk_nope_head_dim"] + mla["v_head_dim"])
    dims = {"m": prefill.kv_tokens, "n": width, "k": mla["kv_lora_rank"]}
    yield from latent_projection(builder, "attn_kv_proj", dims, Partition.COLUMN)
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
    decode = builder.shape.decode
    if decode is None:
        return
    yield latent_query(builder, mla, decode.num_seqs)
    dims = {
        **dims_of(decode),
        "num_heads": mla["num_heads"],
        "kv_lora_rank": mla["kv_lora_rank"],
        "qk_rope_head_dim": mla["qk_rope_head_dim"],
    }
    variant = builder.kv_variant
    yield builder.layer("mla_decode", "mla_decode", dims, Partition.QUERIES, variant)
    yield latent_value(builder, mla, decode.num_seqs)


def latent_query(builder: NodeBuilder, mla: LayerPart, rows: Quantity) -> OperatorNode:
    """Return what takes queries into the latent space."""
    dims = {"m": rows, "n": mla["kv_lora_rank"], "k": mla["qk_nope_head_dim"]}
    return _of_heads(builder, mla, "mla_query_absorb", dims)


def latent_value(builder: NodeBuilder, mla: LayerPart, rows: Quantity) -> OperatorNode:
    """Return what takes values out of the latent space."""
    dims = {"m": rows, "n": mla["v_head_dim"], "k": mla["kv_lora_rank"]}
    return _of_heads(builder, mla, "mla_value_unpack", dims)


def _of_heads(
    builder: NodeBuilder, mla: LayerPart, role: str, dims: dict[str, Quantity]
) -> OperatorNode:
    """Return a product of every head's own matrix, part of the weights that unpack the cache."""
    dims = {"batch": mla["num_heads"], **dims}
    node = builder.layer(role, "batched_gemm", dims, Partition.QUERIES)
    if builder.options.training is not None:
        return node
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
    check=latent_check,
    approximated="the served gate of the output is multiplied in no time of its own",
    backward="as attention with a key 1.5 times as wide as a value, and two products for each of"
    " the projections",
    matrices=LATENT_MATRICES,
)
