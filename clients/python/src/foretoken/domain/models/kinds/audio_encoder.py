"""An encoder of sound whose output stands among the tokens: convolutions among attention."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights

# Two halves of four times the width; queries, keys, values, output and relative positions; both
# products around a convolution, the first with a gate.
_SQUARES_OF_LAYER = 16 + 5 + 3
_NORMS_OF_LAYER = 9


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    hidden, output = d["hidden"], d["output"]
    layer = hidden * (_SQUARES_OF_LAYER * hidden + d["conv_kernel"] + _NORMS_OF_LAYER)
    projected = d["sampled_features"] * hidden + (hidden + 1) * output + output * model.hidden
    yield Weights(total=d["num_layers"] * layer + projected, active=0)


KIND = KindSpec(
    name="audio_encoder",
    place=Place.MODEL,
    summary="conformer over frames of sound, projected to the model's width",
    source="Gulati et al., Conformer, 2020; Gemma 4's modelling file in transformers 5",
    dims=(
        KindDim("num_layers", "its layers", minimum=1),
        KindDim("hidden", "features of a frame inside", minimum=1),
        KindDim("num_heads", "heads of its attention", 8, minimum=1),
        KindDim("chunk", "frames that attend together", 12, minimum=1),
        KindDim("context", "frames that these attend to", 24, minimum=1),
        KindDim("conv_kernel", "frames that a convolution sees", 5, minimum=1),
        KindDim("sampled_features", "features of a frame after it was sampled down", minimum=1),
        KindDim("output", "features that it gives", minimum=1),
    ),
    weights=_weights,
    backward="none of its own: text is trained on, which an encoder hears nothing of",
    approximated=(
        "runs where a workload has sound, without the two convolutions before its layers"
    ),
)
