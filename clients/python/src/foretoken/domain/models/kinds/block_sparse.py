"""Attention of grouped heads to the blocks that an indexer scores highest (MSA of MiniMax-M3)."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.dims import HEADS, INDEXER, local_heads
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    RequestState,
    Weights,
)


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    q_width, kv_width = d["num_heads"] * d["head_dim"], d["num_kv_heads"] * d["head_dim"]
    index = (d["index_heads"] + 1) * d["index_head_dim"]
    yield Weights(total=model.hidden * (2 * (q_width + kv_width) + index), part="attention")
    yield Weights(total=2 * d["head_dim"] + 2 * d["index_head_dim"])


def _state(d: Dims, tp: int) -> RequestState:
    kv_width = 2 * local_heads(d["num_kv_heads"], tp) * d["head_dim"]
    return RequestState(token_elements=kv_width + d["index_head_dim"])


KIND = KindSpec(
    name="block_sparse",
    place=Place.MIXER,
    summary="attention of grouped heads to the blocks that an indexer picks (MSA)",
    source="MiniMax-M3's config.json (`sparse_attention_config`) and modelling file in"
    " transformers 5",
    dims=(*HEADS, *INDEXER, KindDim("block_size", "tokens of a block", minimum=1)),
    weights=_weights,
    state=_state,
    matrices={"attention": ("self_attn.q_proj", "self_attn.o_proj")},
)
