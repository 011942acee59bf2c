"""Attention to a window and to compressed tokens that several layers share (DeepSeek-V4.1)."""

from collections.abc import Iterator, Mapping

from foretoken.domain.lowering.batch_dims import (
    Part,
    dims_of,
    parts_of,
    visible_tokens,
    window_pairs,
)
from foretoken.domain.lowering.graph import DecodeShape, OperatorNode
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.latent import module_node
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
from foretoken.domain.units import Quantity, smaller

# Partial sums of a block, keys and gates, stay in 32 bits.
_SUM_BYTES = 2 * 4
# A key of the indexer has 4 bits a feature, and a scale of a byte for 32.
_INDEX_BYTES = 4 / 8 + 1 / 32


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    q_width = d["num_heads"] * d["head_dim"]
    total = d["q_lora_rank"] * (model.hidden + q_width) + model.hidden * d["head_dim"]
    # Each group of heads has a projection of its own to its rank.
    total += d["o_lora_rank"] * (q_width + d["o_groups"] * model.hidden)
    others = d["q_lora_rank"] + d["head_dim"] + d["num_heads"]
    if d["has_indexer"]:
        total += d["q_lora_rank"] * d["index_heads"] * d["index_head_dim"]
        others += model.hidden * d["index_heads"]
    if d["has_entries"]:
        # A block of one token has no gates; the indexer's keys are made of its entries.
        matrices = 1 + (d["compress_ratio"] > 1)
        others += matrices * model.hidden * d["head_dim"] + d["head_dim"]
        others += (d["head_dim"] + 1) * d["index_head_dim"]
    yield Weights(total=total, part="latent")
    yield Weights(total=others)


def _state(d: Dims, _tp: int) -> RequestState:
    ratio, owns = d["compress_ratio"], d["has_entries"]
    return RequestState(
        token_elements=owns * d["head_dim"] / max(ratio, 1),
        token_bytes=owns * d["index_head_dim"] * _INDEX_BYTES / max(ratio, 1),
        window_elements=d["head_dim"],
        window_tokens=d["window"],
        request_bytes=owns * (ratio > 1) * ratio * d["head_dim"] * _SUM_BYTES,
    )


def _check(d: Dims) -> Mapping[str, tuple[bool, str]]:
    is_seen = d["compress_ratio"] > 0
    return {
        name: (is_seen or not d[name], "must be 0 where compress_ratio is")
        for name in ("has_entries", "has_indexer")
    }


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part = next(iter(parts))
    names = ("window", "num_heads", "q_lora_rank", "head_dim", "o_groups", "o_lora_rank")
    widths = {name: part[name] for name in names}
    # What a layer has not of its own takes no product of it.
    widths["compress_ratio"] = part["has_entries"] * part["compress_ratio"]
    widths["index_num_heads"] = part["has_indexer"] * part["index_heads"]
    widths |= {name: part["has_indexer"] * part[name] for name in ("index_head_dim", "index_topk")}
    for place, (name, batch) in enumerate(parts_of(builder.shape)):
        dims = {**_seen(batch, part), **widths, "hidden": builder.model.hidden}
        operator = f"compressed_attention_{name}_module"
        yield module_node(builder, operator, dims, is_first=place == 0)


def _seen(batch: Part, part: LayerPart) -> dict[str, Quantity]:
    """Return what queries see: tokens of the window, and entries that some indexer picked."""
    ratio, window, topk = part["compress_ratio"], part["window"], part["index_topk"]
    entries = batch.kv_tokens // ratio if ratio else 0 * batch.kv_tokens
    # Where an earlier layer chose candidates, an indexer scores no more.
    scored = (
        smaller(entries, batch.num_seqs * part["candidates"]) if part["candidates"] else entries
    )
    if isinstance(batch, DecodeShape):
        return {
            **dims_of(batch),
            "num_entries": scored,
            "window_tokens": visible_tokens(batch, window),
            "selected_entries": smaller(scored, batch.num_seqs * topk),
        }
    pairs = batch.score_pairs // ratio if ratio else 0 * batch.score_pairs
    if part["candidates"]:
        pairs = smaller(pairs, batch.q_tokens * part["candidates"])
    return {
        "num_seqs": batch.num_seqs,
        "q_tokens": batch.q_tokens,
        "kv_tokens": batch.kv_tokens,
        "num_entries": scored,
        "window_pairs": window_pairs(batch, window),
        "entry_pairs": pairs,
        "selected_pairs": smaller(pairs, batch.q_tokens * topk),
    }


KIND = KindSpec(
    name="shared_compressed",
    place=Place.MIXER,
    summary="attention to a window and to compressed tokens that several layers share (CSA2)",
    source="DeepSeek-V4.1-Flash's config.json, 2026; tensors of its checkpoint as llama.cpp's"
    " loader of `deepseek41` names them; aisimulate 0.13, `sdk/deepseek_v41.py`",
    dims=(
        KindDim("num_heads", "query heads", minimum=1),
        KindDim("head_dim", "features of a head, and of the vector that all share", minimum=1),
        KindDim("qk_rope_head_dim", "features of a head that turn", minimum=1),
        KindDim("q_lora_rank", "rank of the compressed query", minimum=1),
        KindDim("o_lora_rank", "rank of the output of a group of heads", minimum=1),
        KindDim("o_groups", "groups of heads of the output", minimum=1),
        KindDim("window", "tokens that are seen as they are", minimum=1),
        KindDim("compress_ratio", "tokens of a block; 0: the window alone", 0),
        KindDim("index_heads", "heads of the indexer", minimum=1),
        KindDim("index_head_dim", "features of an indexer's head", minimum=1),
        KindDim("index_topk", "blocks that the indexer picks", minimum=1),
        KindDim("has_entries", "1: the layer compresses tokens; 0: an earlier one did", 0),
        KindDim("has_indexer", "1: the layer picks blocks; 0: an earlier one did", 0),
        KindDim("candidates", "blocks that an indexer scores at most; 0: all", 0),
    ),
    weights=_weights,
    state=_state,
    check=_check,
    lower=_lower,
    rotary_dim=lambda d: d["qk_rope_head_dim"],
    split_heads=("num_heads",),
    approximated="prompts run through all layers, also through those after the last that"
    " compresses, of which SGLang may compute the last window alone; stages of a pipeline have no"
    " copy of what they share; what compresses takes as many products as DeepSeek-V4's",
    untrained="its compressors and attention are one kernel, with no published backward pass",
    matrices={"latent": ("self_attn.wq_b", "self_attn.wo_b")},
)
