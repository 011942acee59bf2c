"""Mamba: a state-space layer with a state and a decay for each channel."""

from collections.abc import Iterator, Mapping

from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.recurrent import lower_output, lower_states
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
    CONV_KERNEL,
    STATE_BYTES,
    WHOLE_SEQUENCES,
    recurrent_state,
)

# Of `norm`: none, one without weights, one with.
_WEIGHTED_NORM = 2


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    width, read = d["channels"], d["step_rank"] + 2 * d["state_dim"]
    matrices = 3 * model.hidden * width + width * (read + d["step_rank"])
    yield Weights(total=matrices, part="recurrent")
    # Decays and skip; kernel and bias of the convolution, bias of the step.
    others = width * (d["state_dim"] + 1 + d["conv_kernel"] + 2)
    others += d["has_bias"] * (2 * width + model.hidden) + (d["norm"] == _WEIGHTED_NORM) * read
    yield Weights(total=others)


def _state(d: Dims, tp: int) -> RequestState:
    width = local_heads(d["channels"], tp)
    return recurrent_state(d, width * d["state_dim"], width)


def _check(d: Dims) -> Mapping[str, tuple[bool, str]]:
    return {"norm": (d["norm"] <= _WEIGHTED_NORM, "must be 0, 1 or 2")}


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part, tokens, hidden = next(iter(parts)), builder.shape.num_tokens, builder.model.hidden
    width, rank, state = part["channels"], part["step_rank"], part["state_dim"]
    stored = builder.quantization.weight_of("recurrent")
    dims = {"m": tokens, "n": 2 * width, "k": hidden}
    yield builder.projection("recurrent_in_proj", dims, Partition.COLUMN, stored)
    convolved = {"channels": width, "kernel_size": part["conv_kernel"]}
    yield from lower_states(builder, causal_conv=convolved)
    # The step, compressed, and the way into the state and out of it, which all ranks need whole.
    dims = {"m": tokens, "n": rank + 2 * state, "k": width}
    yield builder.projection("recurrent_x_proj", dims, Partition.ROW, stored)
    if part["norm"]:
        for role, features in (("step_norm", rank), ("b_norm", state), ("c_norm", state)):
            yield builder.layer(role, "rms_norm", {"num_tokens": tokens, "hidden": features})
    dims = {"m": tokens, "n": width, "k": rank}
    yield builder.projection("recurrent_step_proj", dims, Partition.COLUMN, stored)
    yield from lower_states(builder, mamba={"channels": width, "state_dim": state})
    yield from lower_output(builder, width)


KIND = KindSpec(
    name="mamba",
    place=Place.MIXER,
    summary="Mamba: state-space layer with a state for each channel",
    source="Gu and Dao, Mamba, 2023; Mamba's, Jamba's and Falcon-Mamba's modelling files in"
    " transformers 5; vLLM, model_executor/layers/mamba/mamba_mixer.py (split over ranks)",
    dims=(
        KindDim("channels", "features, each with a state", minimum=1),
        KindDim("state_dim", "width of the state of a feature", 16, minimum=1),
        KindDim("step_rank", "rank of the compressed time step", minimum=1),
        CONV_KERNEL,
        KindDim("norm", "norms of step, input and output; 1: without weights, 2: with", 0),
        KindDim("has_bias", "1: the projections have a bias", 0),
        STATE_BYTES,
    ),
    weights=_weights,
    state=_state,
    lower=_lower,
    approximated="a cached prefix is taken to have its state too, which engines keep at the ends of"
    " some blocks",
    untrained="its ranks sum steps and states in the midst of a layer, as no trainer here does;"
    " hybrids that Megatron trains are of Mamba2",
    whole_sequences=WHOLE_SEQUENCES,
    split_heads=("channels",),
    check=_check,
    matrices={"recurrent": ("mixer.in_proj", "mixer.out_proj")},
)
