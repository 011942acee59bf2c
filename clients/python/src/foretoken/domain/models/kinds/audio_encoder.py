"""An encoder of sound whose output stands among the tokens: convolutions among attention."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights

# Gemma's norms have no biases; those of others have, and one more is around the convolution.
_NORMS_OF_LAYER, _BIASED_NORMS_OF_LAYER = 9, 10


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    hidden, output = d["hidden"], d["output"]
    inner, convolved = d["intermediate"] or 4 * hidden, d["conv_width"] or hidden
    # Two halves of an MLP; queries, keys, values, output; both products around a convolution, the
    # first with a gate.
    layer = 4 * hidden * inner + 4 * hidden**2 + convolved * (3 * hidden + d["conv_kernel"])
    if d["num_positions"]:
        layer += d["num_positions"] * (hidden // d["num_heads"])
        biases = 2 * (inner + hidden) + hidden + 2 * convolved + hidden
        layer += biases + _BIASED_NORMS_OF_LAYER * hidden + 2 * convolved
    else:
        layer += hidden**2 + _NORMS_OF_LAYER * hidden
    out = (hidden + 1) * output + output * model.hidden if output else (hidden + 1) * model.hidden
    projected = d["sampled_features"] * hidden + out + d["query_layers"] * _query_layer(d)
    yield Weights(total=d["num_layers"] * layer + projected, active=0)


def _query_layer(d: Dims) -> int:
    """Return a layer of queries: they attend to each other, then to frames, each with a norm."""
    hidden, inner = d["hidden"], d["query_intermediate"]
    return 8 * (hidden + 1) * hidden + 2 * hidden * inner + inner + hidden + 6 * hidden


KIND = KindSpec(
    name="audio_encoder",
    place=Place.MODEL,
    summary="conformer over frames of sound, projected to the model's width",
    source="Gulati et al., Conformer, 2020; Li et al., BLIP-2, 2023 (queries); modelling files of"
    " Gemma 4 and Granite Speech in transformers 5",
    dims=(
        KindDim("num_layers", "its layers", minimum=1),
        KindDim("hidden", "features of a frame inside", minimum=1),
        KindDim("num_heads", "heads of its attention", 8, minimum=1),
        KindDim("chunk", "frames that attend together", 12, minimum=1),
        KindDim("context", "frames that these attend to", 24, minimum=1),
        KindDim("conv_kernel", "frames that a convolution sees", 5, minimum=1),
        KindDim("sampled_features", "features of a frame after it was sampled down", minimum=1),
        KindDim(
            "output",
            "features that it gives before its projector; 0: the projector takes those inside",
            0,
        ),
        KindDim("intermediate", "features inside a half of its MLP; 0: four times its width", 0),
        KindDim("conv_width", "features inside its convolution; 0: as inside", 0),
        KindDim("num_positions", "learned distances; 0: a product makes them", 0),
        KindDim("frame_ms", "sound of a frame, in ms", 40, minimum=1),
        KindDim("max_frames", "frames of a recording at most; 0: any", 750),
        KindDim(
            "query_window",
            "frames that queries attend to, or of which one is a token; 0: all are",
            0,
        ),
        KindDim("window_queries", "queries of a window, each a token", 1, minimum=1),
        KindDim("query_layers", "layers of queries", 0),
        KindDim("query_heads", "heads of their attention", 1, minimum=1),
        KindDim("query_intermediate", "features inside their MLP", 0),
    ),
    weights=_weights,
    backward="none of its own: text is trained on, which an encoder hears nothing of",
    approximated=(
        "runs where a workload has sound, without the two convolutions before its layers; an"
        " adapter that text gets with sound is one of the workload's"
    ),
)
