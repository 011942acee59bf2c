"""Hyper-connections kept to a manifold (mHC): several streams of the residual, mixed each half."""

from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights
from foretoken.domain.models.layer import LayerPart

# What is learned of how far each of the three mixtures goes.
_SCALES = 3


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    streams = d["num_streams"]
    mixed = (2 + streams) * streams
    half = mixed * (streams * model.hidden + 1) + _SCALES
    head = streams * (streams * model.hidden + 1) + 1
    yield Weights(total=2 * model.num_layers * half + head)


def _around(
    builder: NodeBuilder, part: LayerPart, half: Iterator[OperatorNode]
) -> Iterator[OperatorNode]:
    """Yield a half of a layer with the mixing before and after it."""
    dims = {
        "num_tokens": builder.shape.num_tokens,
        "num_streams": part["num_streams"],
        "hidden": builder.model.hidden,
    }
    before = {**dims, "sinkhorn_steps": part["num_sinkhorn"]}
    yield builder.layer("mhc_pre", "mhc_pre", before)
    yield from half
    yield builder.layer("mhc_post", "mhc_post", dims)


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
    around=_around,
    untrained="how its mixing keeps several streams for a backward pass is not known here",
)
