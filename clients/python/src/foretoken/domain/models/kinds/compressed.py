"""Attention to compressed tokens and a window (CSA and HCA of DeepSeek-V4)."""

from collections.abc import Iterator
from dataclasses import dataclass

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
from foretoken.domain.models.kinds.spec.dims import (
    BLOCK_SUM_BYTES,
    COMPRESSED,
    INDEX_SCALE_BYTES,
)
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

# Up to this ratio blocks overlap and an indexer picks among them (CSA); above, none does (HCA).
INDEXED_RATIO = 4


def is_indexed(d: Dims) -> bool:
    """Return whether an indexer picks blocks."""
    return 0 < d["compress_ratio"] <= INDEXED_RATIO


def _compressor(d: Dims, model: ModelArchitecture, width: int) -> tuple[int, int]:
    """Return weights of a compressor's matrices, and its others."""
    features = (1 + is_indexed(d)) * width
    return 2 * features * model.hidden, d["compress_ratio"] * features + width


def count_attention(d: Dims, model: ModelArchitecture, *, has_indexer: bool) -> tuple[int, int]:
    """Return weights of an attention's matrices, and its others, without what compresses tokens."""
    q_width = d["num_heads"] * d["head_dim"]
    matrices = d["q_lora_rank"] * (model.hidden + q_width) + model.hidden * d["head_dim"]
    # Each group of heads has a projection of its own to its rank.
    matrices += d["o_lora_rank"] * (q_width + d["o_groups"] * model.hidden)
    others = d["q_lora_rank"] + d["head_dim"] + d["num_heads"]
    if has_indexer:
        matrices += d["q_lora_rank"] * d["index_heads"] * d["index_head_dim"]
        others += model.hidden * d["index_heads"]
    return matrices, others


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    total, others = count_attention(d, model, has_indexer=is_indexed(d))
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
    index_bytes = is_indexed(d) * (d["index_head_dim"] + INDEX_SCALE_BYTES) / ratio
    features = (1 + is_indexed(d)) * (d["head_dim"] + is_indexed(d) * d["index_head_dim"])
    return RequestState(
        token_elements=d["head_dim"] / ratio,
        token_bytes=index_bytes,
        window_elements=d["head_dim"],
        window_tokens=window,
        request_bytes=(1 + is_indexed(d)) * ratio * features * BLOCK_SUM_BYTES,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedBlock:
    """Products that a layer has of its own, and what its queries see: None is all there is."""

    compress_ratio: int
    has_indexer: bool
    topk: int | None
    candidates: int | None = None

    def lower(self, builder: NodeBuilder, part: LayerPart) -> Iterator[OperatorNode]:
        """Yield the operators of prompts and of decoding."""
        names = ("window", "num_heads", "q_lora_rank", "head_dim", "o_groups", "o_lora_rank")
        widths = {name: part[name] for name in names}
        index = ("index_heads", "index_head_dim", "index_topk")
        heads, head_dim, topk = (self.has_indexer * part[name] for name in index)
        widths |= {"index_num_heads": heads, "index_head_dim": head_dim, "index_topk": topk}
        widths |= {"compress_ratio": self.compress_ratio, "hidden": builder.model.hidden}
        for place, (name, batch) in enumerate(parts_of(builder.shape)):
            operator = f"compressed_attention_{name}_module"
            yield module_node(
                builder, operator, {**self._seen(batch, part), **widths}, is_first=place == 0
            )

    def _seen(self, batch: Part, part: LayerPart) -> dict[str, Quantity]:
        """Return what queries see: tokens of the window, and compressed entries of all before."""
        ratio, window = part["compress_ratio"], part["window"]
        entries = batch.kv_tokens // ratio if ratio else 0 * batch.kv_tokens
        entries = _limit(entries, batch.num_seqs, self.candidates)
        if isinstance(batch, DecodeShape):
            return {
                **dims_of(batch),
                "num_entries": entries,
                "window_tokens": visible_tokens(batch, window),
                "selected_entries": _limit(entries, batch.num_seqs, self.topk),
            }
        pairs = batch.score_pairs // ratio if ratio else 0 * batch.score_pairs
        pairs = _limit(pairs, batch.q_tokens, self.candidates)
        return {
            "num_seqs": batch.num_seqs,
            "q_tokens": batch.q_tokens,
            "kv_tokens": batch.kv_tokens,
            "num_entries": entries,
            "window_pairs": window_pairs(batch, window),
            "entry_pairs": pairs,
            "selected_pairs": _limit(pairs, batch.q_tokens, self.topk),
        }


def _limit(entries: Quantity, num_queries: Quantity, most: int | None) -> Quantity:
    return entries if most is None else smaller(entries, num_queries * most)


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part = next(iter(parts))
    has_indexer = is_indexed(part.dims)
    return CompressedBlock(
        compress_ratio=part["compress_ratio"],
        has_indexer=has_indexer,
        topk=part["index_topk"] if has_indexer else None,
    ).lower(builder, part)


KIND = KindSpec(
    name="compressed",
    place=Place.MIXER,
    summary="attention to compressed blocks of tokens and a window (CSA, HCA)",
    source="DeepSeek-V4 Technical Report, 2026, sections 2.1 and 2.2, and its modelling file in"
    " transformers 5",
    dims=(
        *COMPRESSED,
        KindDim("index_heads", "heads of the indexer", 0),
        KindDim("index_head_dim", "features of an indexer's head", 0),
        KindDim("index_topk", "blocks that the indexer picks", 0),
    ),
    weights=_weights,
    state=_state,
    lower=_lower,
    rotary_dim=lambda d: d["qk_rope_head_dim"],
    split_heads=("num_heads",),
    approximated="the KV cache has one format; engines keep positional features in 16 bits",
    untrained="its compressors and attention are one kernel, with no published backward pass",
    matrices={"latent": ("self_attn.wq_b", "self_attn.wo_b")},
)
