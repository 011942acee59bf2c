"""Attention to compressed tokens and a window (CSA and HCA of DeepSeek-V4)."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    RequestState,
    Weights,
)

# Up to this ratio blocks overlap and an indexer picks among them (CSA); above, none does (HCA).
INDEXED_RATIO = 4
# Partial sums of a block, keys and gates, stay in 32 bits.
_SUM_BYTES = 2 * 4
# Scale of a key of the indexer, which is kept in 8 bits.
_SCALE_BYTES = 4


def is_indexed(d: Dims) -> bool:
    """Return whether an indexer picks blocks."""
    return 0 < d["compress_ratio"] <= INDEXED_RATIO


def _compressor(d: Dims, model: ModelArchitecture, width: int) -> tuple[int, int]:
    """Return weights of a compressor's matrices, and its others."""
    features = (1 + is_indexed(d)) * width
    return 2 * features * model.hidden, d["compress_ratio"] * features + width


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    q_width = d["num_heads"] * d["head_dim"]
    out_rank = d["o_groups"] * d["o_lora_rank"]
    total = d["q_lora_rank"] * (model.hidden + q_width) + model.hidden * d["head_dim"]
    # Each group of heads has a projection of its own to its rank.
    total += d["o_lora_rank"] * q_width + out_rank * model.hidden
    others = d["q_lora_rank"] + d["head_dim"] + d["num_heads"]
    if is_indexed(d):
        total += d["q_lora_rank"] * d["index_heads"] * d["index_head_dim"]
        others += model.hidden * d["index_heads"]
    widths = [d["head_dim"]] if d["compress_ratio"] else []
    widths += [d["index_head_dim"]] if is_indexed(d) else []
    for width in widths:
        matrices, rest = _compressor(d, model, width)
        others += matrices + rest
    yield Weights(total=total, part="latent")
    yield Weights(total=others)


def _state(d: Dims, _tp: int) -> RequestState:
    ratio, window = d["compress_ratio"], d["window"]
    if not ratio:
        return RequestState(window_elements=d["head_dim"], window_tokens=window)
    index_bytes = is_indexed(d) * (d["index_head_dim"] + _SCALE_BYTES) / ratio
    features = (1 + is_indexed(d)) * (d["head_dim"] + is_indexed(d) * d["index_head_dim"])
    return RequestState(
        token_elements=d["head_dim"] / ratio,
        token_bytes=index_bytes,
        window_elements=d["head_dim"],
        window_tokens=window,
        request_bytes=(1 + is_indexed(d)) * ratio * features * _SUM_BYTES,
    )


KIND = KindSpec(
    name="compressed",
    place=Place.MIXER,
    summary="attention to compressed blocks of tokens and a window (CSA, HCA)",
    source="DeepSeek-V4 Technical Report, 2026, sections 2.1 and 2.2, and its modelling file in"
    " transformers 5",
    dims=(
        KindDim("num_heads", "query heads", minimum=1),
        KindDim("head_dim", "features of a head, and of the vector that all share", minimum=1),
        KindDim("qk_rope_head_dim", "features of a head that turn", minimum=1),
        KindDim("q_lora_rank", "rank of the compressed query", minimum=1),
        KindDim("o_lora_rank", "rank of the output of a group of heads", minimum=1),
        KindDim("o_groups", "groups of heads of the output", minimum=1),
        KindDim("window", "tokens that are seen as they are", minimum=1),
        KindDim("compress_ratio", "tokens of a block; 0: the window alone", 0),
        KindDim("index_heads", "heads of the indexer", 0),
        KindDim("index_head_dim", "features of an indexer's head", 0),
        KindDim("index_topk", "blocks that the indexer picks", 0),
    ),
    weights=_weights,
    state=_state,
    approximated="the KV cache has one format; engines keep positional features in 16 bits",
    matrices={"latent": ("self_attn.wq_b", "self_attn.wo_b")},
)
