"""A gated convolution over a few tokens: a layer that keeps no more of a request than these."""

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
    CONV_KERNEL,
    WHOLE_SEQUENCES,
    convolved_bytes,
)


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    width = d["channels"]
    # Both gates and the input; the output.
    yield Weights(total=4 * model.hidden * width, part="recurrent")
    biases = d["has_bias"] * (3 * width + model.hidden + width)
    yield Weights(total=width * d["conv_kernel"] + biases)


def _state(d: Dims, tp: int) -> RequestState:
    return RequestState(request_bytes=convolved_bytes(d, local_heads(d["channels"], tp)))


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part, tokens, hidden = next(iter(parts)), builder.shape.num_tokens, builder.model.hidden
    width, stored = part["channels"], builder.quantization.weight_of("recurrent")
    dims = {"m": tokens, "n": 3 * width, "k": hidden}
    yield from project(builder, "recurrent_in_proj", dims, Partition.COLUMN, stored)
    yield from lower_gate(builder, width)
    convolved = {"channels": width, "kernel_size": part["conv_kernel"]}
    yield from lower_states(builder, causal_conv=convolved)
    yield from lower_gate(builder, width)
    yield from lower_output(builder, width)


KIND = KindSpec(
    name="short_conv",
    place=Place.MIXER,
    summary="convolution over a few tokens between two gates",
    source="LFM2 Technical Report, 2025, section 2; LFM2's modelling file in transformers 5",
    dims=(
        KindDim("channels", "features that are convolved, each for itself", minimum=1),
        CONV_KERNEL,
        KindDim("has_bias", "1: projections and convolution have a bias", 0),
    ),
    weights=_weights,
    state=_state,
    lower=_lower,
    approximated="a cached prefix is taken to have its last inputs too; the products with both"
    " gates take no time of their own where they are served",
    backward="causal-conv1d",
    whole_sequences=WHOLE_SEQUENCES,
    split_heads=("channels",),
    matrices={"recurrent": ("conv.in_proj", "conv.out_proj")},
)
