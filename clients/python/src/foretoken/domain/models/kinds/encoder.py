"""An encoder of images or sound whose output stands among the tokens."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    hidden, width = d["hidden"], d["attention_width"] or d["hidden"]
    layer = 4 * hidden * width + (2 + d["is_gated"]) * hidden * d["intermediate"]
    layer += d["has_bias"] * (3 * width + 2 * hidden + d["intermediate"]) + 4 * hidden
    inputs = d["patch_features"] * hidden + d["num_positions"] * hidden
    into = d["projector_in"] or hidden
    middle = d["projector_intermediate"]
    inner = d["projector_inner"] * middle**2
    projector = into * middle + inner + middle * model.hidden if middle else into * model.hidden
    total = d["num_layers"] * layer + inputs + d["num_projectors"] * projector
    yield Weights(total=total, active=0)


KIND = KindSpec(
    name="encoder",
    place=Place.MODEL,
    summary="transformer over patches of images or frames of sound, projected to the model's width",
    source="modelling files of Qwen3-VL, Kimi-K2.5 and Gemma 4 in transformers 5",
    dims=(
        KindDim("num_layers", "its layers", minimum=1),
        KindDim("hidden", "features of a patch inside", minimum=1),
        KindDim("num_heads", "heads of its attention", minimum=1),
        KindDim("intermediate", "features between the products of its MLP", minimum=1),
        KindDim("attention_width", "features of all heads; 0: as inside", 0),
        KindDim("is_gated", "1: its MLP has a gate", 0),
        KindDim("has_bias", "1: its projections have biases", 0),
        KindDim("patch_features", "numbers of a patch", minimum=1),
        KindDim("num_positions", "learned positions", 0),
        KindDim("projector_in", "features that a projector takes; 0: of a patch", 0),
        KindDim("projector_intermediate", "features inside it; 0: it is one matrix", 0),
        KindDim("projector_inner", "products inside it, between its first and its last", 0),
        KindDim("num_projectors", "projectors, those of inner layers included", 1, 1),
        KindDim("patch_side", "pixels along a side of a patch; 0: not known, it cannot run", 0),
        KindDim("merged_patches", "patches that become one token", 1, 1),
        KindDim("max_image_tokens", "tokens of an image at most, which is made smaller; 0: any", 0),
    ),
    weights=_weights,
    backward="none of its own: text is trained on, which an encoder sees nothing of",
    approximated="runs where a workload has images, over whole images; windows are not known",
)
