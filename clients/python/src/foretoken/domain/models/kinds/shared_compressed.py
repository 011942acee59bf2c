"""Attention to a window and to compressed tokens that several layers share (DeepSeek-V4.1)."""

from collections.abc import Iterator, Mapping

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.compressed import CompressedBlock, count_attention
from foretoken.domain.models.kinds.spec.dims import BLOCK_SUM_BYTES, COMPRESSED, INDEXER
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    Placed,
    RequestState,
    Weights,
)

# A key of the indexer has 4 bits a feature, and a scale of a byte for 32.
_INDEX_BYTES = 4 / 8 + 1 / 32


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    total, others = count_attention(d, model, has_indexer=bool(d["has_indexer"]))
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
        request_bytes=owns * (ratio > 1) * ratio * d["head_dim"] * BLOCK_SUM_BYTES,
    )


def _check(d: Dims) -> Mapping[str, tuple[bool, str]]:
    is_seen = d["compress_ratio"] > 0
    return {
        name: (is_seen or not d[name], "must be 0 where compress_ratio is")
        for name in ("has_entries", "has_indexer")
    }


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part = next(iter(parts))
    # What a layer has not of its own takes no product of it. Where an earlier layer chose
    # candidates, an indexer scores no more.
    return CompressedBlock(
        compress_ratio=part["has_entries"] * part["compress_ratio"],
        has_indexer=bool(part["has_indexer"]),
        topk=part["index_topk"],
        candidates=part["candidates"] or None,
    ).lower(builder, part)


KIND = KindSpec(
    name="shared_compressed",
    place=Place.MIXER,
    summary="attention to a window and to compressed tokens that several layers share (CSA2)",
    source="DeepSeek-V4.1-Flash's config.json, 2026; tensors of its checkpoint as llama.cpp's"
    " loader of `deepseek41` names them; aisimulate 0.13, `sdk/deepseek_v41.py`",
    dims=(
        *COMPRESSED,
        *INDEXER,
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
