"""Kimi delta attention: a delta net whose state forgets feature by feature."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.dims import local_heads
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    RequestState,
    Weights,
)

# The convolutions keep their last inputs in 16 bits.
_INPUT_BYTES = 2


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    width = d["num_heads"] * d["head_dim"]
    low_rank = d["head_dim"] * (model.hidden + width)
    gate = model.hidden * width if d["has_full_gate"] else low_rank
    # Queries, keys, values and output; the forget gate of low rank; the output's.
    yield Weights(total=4 * model.hidden * width + low_rank + gate, part="recurrent")
    others = model.hidden * d["num_heads"] + d["num_heads"] + width
    yield Weights(total=others + 3 * width * d["conv_kernel"] + d["head_dim"])


def _state(d: Dims, tp: int) -> RequestState:
    width = local_heads(d["num_heads"], tp) * d["head_dim"]
    state = width * d["head_dim"] * d["state_bytes"]
    return RequestState(
        request_bytes=state + 3 * width * (d["conv_kernel"] - 1) * _INPUT_BYTES,
    )


KIND = KindSpec(
    name="kda",
    place=Place.MIXER,
    summary="Kimi delta attention: linear attention with a recurrent state",
    source="Kimi Linear, 2025, section 3, and its modelling file in transformers 5; Kimi K3's"
    " config.json (`use_full_rank_gate`)",
    dims=(
        KindDim("num_heads", "heads, each with a state", minimum=1),
        KindDim("head_dim", "features of a head", minimum=1),
        KindDim("conv_kernel", "tokens that a convolution sees", 4, minimum=1),
        KindDim("has_full_gate", "1: the gate of the output is one matrix, 0: of low rank", 0),
        KindDim("state_bytes", "bytes of a number of the state", 4, minimum=1),
    ),
    weights=_weights,
    state=_state,
    matrices={"recurrent": ("self_attn.q_proj", "self_attn.o_proj")},
)
