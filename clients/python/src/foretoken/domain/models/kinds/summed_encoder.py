"""An encoder of images whose layers are known by their sums: convolutions, or halves of an MLP."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    yield Weights(total=d["num_weights"] + d["projected"] * model.hidden, active=0)


KIND = KindSpec(
    name="summed_encoder",
    place=Place.MODEL,
    summary="encoder of images by its weights and products, projected to the model's width",
    source="MobileNet-V5 (300M) of timm 1.0.31, counted at 768 by 768 pixels (387.8 and, between"
    " tokens, 47.9 G products), which Gemma 3n sees with; Inkling's modelling file in"
    " transformers 5",
    dims=(
        KindDim("num_weights", "weights of its layers", minimum=1),
        KindDim("repeats", "how often each multiplies for an image, or a patch", minimum=1),
        KindDim("projected", "features that a projector takes; 0: there is none", 0),
        KindDim("patch_side", "pixels along a side of a patch; 0: all images have one size", 0),
        KindDim("num_tokens", "tokens of an image, or of a patch", 1, minimum=1),
        KindDim("frames", "frames of a video that a patch reaches over", 1, minimum=1),
        KindDim("num_projectors", "projectors", 1, minimum=1),
    ),
    weights=_weights,
    backward="none of its own: text is trained on, which an encoder sees nothing of",
    approximated="runs where a workload has images, as one product of as many multiplications",
)
