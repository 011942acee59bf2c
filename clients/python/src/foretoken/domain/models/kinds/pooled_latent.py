"""Latent attention without positions to the pools of tokens that an indexer scores highest."""

from collections.abc import Iterator

from foretoken.domain.lowering.batch_dims import parts_of, selected_dims
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.latent import module_node
from foretoken.domain.models.kinds.spec.dims import BLOCK_SUM_BYTES, INDEX_SCALE_BYTES, INDEXER
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    Placed,
    RequestState,
    Weights,
)


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    hidden, rank = model.hidden, d["q_lora_rank"]
    queries = rank * (hidden + d["num_heads"] * d["qk_nope_head_dim"])
    out = d["num_heads"] * d["v_head_dim"] * hidden
    yield Weights(total=queries + hidden * d["kv_lora_rank"] + out, part="latent")
    # What unpacks vectors, and the indexer, stay wide; the norm of its keys has a bias.
    unpacked = d["kv_lora_rank"] * d["num_heads"] * (d["qk_nope_head_dim"] + d["v_head_dim"])
    width = d["index_head_dim"]
    index = d["index_heads"] * (rank * width + hidden) + (2 * hidden + d["index_pool"] + 2) * width
    yield Weights(total=unpacked + index + rank + d["kv_lora_rank"])


def _state(d: Dims, _tp: int) -> RequestState:
    return RequestState(
        token_elements=d["kv_lora_rank"],
        token_bytes=(d["index_head_dim"] + INDEX_SCALE_BYTES) / d["index_pool"],
        request_bytes=(d["index_pool"] - 1) * d["index_head_dim"] * BLOCK_SUM_BYTES,
    )


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part = next(iter(parts))
    names = ("num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    widths = {name: part[name] for name in (*names, "index_head_dim", "index_topk", "index_pool")}
    widths |= {"hidden": builder.model.hidden, "index_num_heads": part["index_heads"]}
    for index, (name, batch) in enumerate(parts_of(builder.shape)):
        dims = {**selected_dims(batch, part["index_topk"]), **widths}
        yield module_node(builder, f"pooled_attention_{name}_module", dims, is_first=index == 0)


KIND = KindSpec(
    name="pooled_latent",
    place=Place.MIXER,
    summary="latent attention without positions to pools of tokens that an indexer picks",
    source="GLM-5.3-Flash's modelling file in transformers 5 (`glm5_next`), 2026",
    dims=(
        KindDim("num_heads", "query heads", minimum=1),
        KindDim("q_lora_rank", "rank of the compressed query", minimum=1),
        KindDim("kv_lora_rank", "rank of the compressed keys and values", minimum=1),
        KindDim("qk_nope_head_dim", "features of a head", minimum=1),
        KindDim("v_head_dim", "features of a value head", minimum=1),
        *INDEXER,
        KindDim("index_pool", "tokens of a pool, which has one key of the indexer", minimum=1),
    ),
    weights=_weights,
    state=_state,
    lower=_lower,
    split_heads=("num_heads",),
    approximated="the tokens of a pool that is not full, which every query sees, are not counted;"
    " a rank's memory has all its weights in one format",
    untrained="how its pools are chosen in training is not published",
    matrices={"latent": ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.o_proj")},
)
