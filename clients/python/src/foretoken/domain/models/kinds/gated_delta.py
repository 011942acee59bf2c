"""Gated delta net: linear attention with a state a head and a short convolution before it."""

from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.recurrent import lower_output, lower_states
from foretoken.domain.lowering.training_layer import lower_gate, project
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.dims import local_heads
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    Placed,
    RequestState,
    Weights,
)
from foretoken.domain.models.kinds.spec.recurrent import (
    APPROXIMATED,
    BACKWARD,
    CONV_KERNEL,
    STATE_BYTES,
    WHOLE_SEQUENCES,
    recurrent_state,
)


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
    return recurrent_state(d, num_values * d["key_head_dim"] * d["value_head_dim"], channels)


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part, tokens, weight = next(iter(parts)), builder.shape.num_tokens, builder.quantization
    is_training = builder.options.training is not None
    keys = part["num_key_heads"] * part["key_head_dim"]
    num_values, value_dim = part["num_value_heads"], part["value_head_dim"]
    values = num_values * value_dim
    # Queries, keys, values and the gate of the output; then decay and step of each head, which are
    # trained as part of the same. Source: Megatron-Core, `ssm/gated_delta_net.py` (in_proj).
    width = 2 * keys + 2 * values + is_training * 2 * num_values
    dims = {"m": tokens, "n": width, "k": builder.model.hidden}
    stored = weight.weight_of("recurrent")
    yield from project(builder, "recurrent_in_proj", dims, Partition.COLUMN, stored)
    if not is_training:
        dims = {"m": tokens, "n": 2 * num_values, "k": builder.model.hidden}
        yield builder.layer("recurrent_decay_proj", "gemm", dims, Partition.COLUMN)
    dims = {
        "num_k_heads": part["num_key_heads"],
        "num_v_heads": num_values,
        "head_k_dim": part["key_head_dim"],
        "head_v_dim": value_dim,
    }
    convolved = {"channels": 2 * keys + values, "kernel_size": part["conv_kernel"]}
    yield from lower_states(builder, causal_conv=convolved, gated_delta=dims)
    dims = {"num_tokens": tokens * num_values, "hidden": value_dim}
    yield builder.layer("recurrent_norm", "rms_norm", dims, Partition.HEADS)
    yield from lower_gate(builder, values)
    yield from lower_output(builder, values)


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
        CONV_KERNEL,
        STATE_BYTES,
    ),
    weights=_weights,
    state=_state,
    lower=_lower,
    approximated=APPROXIMATED,
    backward=BACKWARD,
    whole_sequences=WHOLE_SEQUENCES,
    split_heads=("num_value_heads",),
    matrices={"recurrent": ("linear_attn.in_proj_qkv", "linear_attn.out_proj")},
)
