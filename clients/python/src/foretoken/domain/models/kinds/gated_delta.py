"""Gated delta net: linear attention with a state a head and a short convolution before it."""

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

# The convolution keeps its last inputs in 16 bits.
_INPUT_BYTES = 2


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    keys = d["num_key_heads"] * d["key_head_dim"]
    values = d["num_value_heads"] * d["value_head_dim"]
    # Queries, keys, values, gate; and the output.
    yield Weights(total=model.hidden * (2 * keys + 2 * values + values), part="recurrent")
    others = 2 * model.hidden * d["num_value_heads"] + 2 * d["num_value_heads"]
    others += (2 * keys + values) * d["conv_kernel"] + d["value_head_dim"]
    yield Weights(total=others)


def _state(d: Dims, tp: int) -> RequestState:
    num_keys, num_values = (
        local_heads(d["num_key_heads"], tp),
        local_heads(d["num_value_heads"], tp),
    )
    channels = 2 * num_keys * d["key_head_dim"] + num_values * d["value_head_dim"]
    state = num_values * d["key_head_dim"] * d["value_head_dim"] * d["state_bytes"]
    return RequestState(
        request_bytes=state + channels * (d["conv_kernel"] - 1) * _INPUT_BYTES,
    )


KIND = KindSpec(
    name="gated_delta",
    place=Place.MIXER,
    summary="gated delta net: linear attention with a recurrent state",
    source="Yang et al., Gated Delta Networks, 2024; Qwen3.5's modelling file in transformers 5",
    dims=(
        KindDim("num_key_heads", "query and key heads", minimum=1),
        KindDim("key_head_dim", "features of a key head", minimum=1),
        KindDim("num_value_heads", "value heads, each with a state", minimum=1),
        KindDim("value_head_dim", "features of a value head", minimum=1),
        KindDim("conv_kernel", "tokens that the convolution sees", 4, minimum=1),
        KindDim("state_bytes", "bytes of a number of the state", 4, minimum=1),
    ),
    weights=_weights,
    state=_state,
    matrices={"recurrent": ("linear_attn.in_proj_qkv", "linear_attn.out_proj")},
)
