"""Mamba2: a state-space layer with a scalar decay a head."""

from collections.abc import Iterator, Mapping

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
    width, grouped = d["num_heads"] * d["head_dim"], 2 * d["num_groups"] * d["state_dim"]
    projected = 2 * width + grouped + d["num_heads"]
    yield Weights(total=model.hidden * (projected + width), part="recurrent")
    # Kernel and bias of the convolution; decay, skip and time step of each head; the norm.
    others = (width + grouped) * (d["conv_kernel"] + 1) + 3 * d["num_heads"] + width
    others += d["has_bias"] * (projected + model.hidden)
    yield Weights(total=others)


def _state(d: Dims, tp: int) -> RequestState:
    width = local_heads(d["num_heads"], tp) * d["head_dim"]
    grouped = 2 * local_heads(d["num_groups"], tp) * d["state_dim"]
    return recurrent_state(d, width * d["state_dim"], width + grouped)


def _check(d: Dims) -> Mapping[str, tuple[bool, str]]:
    return {
        "num_groups": (
            d["num_heads"] % d["num_groups"] == 0,
            f"{d['num_groups']} must divide the {d['num_heads']} heads",
        )
    }


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part, tokens, hidden = next(iter(parts)), builder.shape.num_tokens, builder.model.hidden
    width = part["num_heads"] * part["head_dim"]
    grouped = 2 * part["num_groups"] * part["state_dim"]
    stored = builder.quantization.weight_of("recurrent")
    # The gate, the input, its way into the state and out of it, and the step of each head.
    dims = {"m": tokens, "n": 2 * width + grouped + part["num_heads"], "k": hidden}
    yield from project(builder, "recurrent_in_proj", dims, Partition.COLUMN, stored)
    dims = {name: part[name] for name in ("num_heads", "head_dim", "num_groups", "state_dim")}
    convolved = {"channels": width + grouped, "kernel_size": part["conv_kernel"]}
    yield from lower_states(builder, causal_conv=convolved, mamba2=dims)
    yield from lower_gate(builder, width)
    dims = {"num_tokens": tokens, "hidden": width}
    yield builder.layer("recurrent_norm_of_all", "rms_norm", dims, Partition.WIDTH)
    yield from lower_output(builder, width)


KIND = KindSpec(
    name="mamba2",
    place=Place.MIXER,
    summary="Mamba2: state-space layer with a recurrent state",
    source="Dao and Gu, Transformers are SSMs, 2024; Nemotron-H's modelling file in transformers 5",
    dims=(
        KindDim("num_heads", "heads, each with a state", minimum=1),
        KindDim("head_dim", "features of a head", minimum=1),
        KindDim("state_dim", "width of the state of a feature", minimum=1),
        KindDim("num_groups", "groups of heads that share input and output of the state", 1, 1),
        CONV_KERNEL,
        KindDim("has_bias", "1: the projections have a bias", 0),
        STATE_BYTES,
    ),
    weights=_weights,
    state=_state,
    lower=_lower,
    approximated=APPROXIMATED,
    backward=BACKWARD,
    whole_sequences=WHOLE_SEQUENCES,
    split_heads=("num_heads",),
    check=_check,
    matrices={"recurrent": ("mixer.in_proj", "mixer.out_proj")},
)
