"""Hyper-connections kept to a manifold (mHC): several streams of the residual, mixed each half."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights

# What is learned of how far each of the three mixtures goes.
_SCALES = 3


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    streams = d["num_streams"]
    mixed = (2 + streams) * streams
    half = mixed * (streams * model.hidden + 1) + _SCALES
    head = streams * (streams * model.hidden + 1) + 1
    yield Weights(total=2 * model.num_layers * half + head)


KIND = KindSpec(
    name="hyper_connections",
    place=Place.MODEL,
    summary="several streams of the residual, mixed before and after each half of a layer (mHC)",
    source="Xie et al., mHC, 2025; DeepSeek-V4's modelling file in transformers 5",
    dims=(
        KindDim("num_streams", "streams of the residual", minimum=2),
        KindDim("num_sinkhorn", "steps that balance the mixture", 20, minimum=1),
    ),
    weights=_weights,
)
