"""Hyper-connections kept to a manifold (mHC): several streams of the residual, mixed each half."""

from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights
from foretoken.domain.models.layer import LayerPart


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    streams = d["num_streams"]
    # Into a half, out of it, and among each other where they mix; how far each mixture goes.
    mixed = (2 + (streams if d["num_sinkhorn"] else 0)) * streams
    half = mixed * (streams * model.hidden + 1) + (3 if d["num_sinkhorn"] else 2)
    head = streams * (streams * model.hidden + 1) + 1
    yield Weights(total=2 * model.num_layers * half + d["has_head"] * head)


def _around(
    builder: NodeBuilder, part: LayerPart, half: Iterator[OperatorNode]
) -> Iterator[OperatorNode]:
    """Yield a half of a layer with the mixing before and after it."""
    dims = {
        "num_tokens": builder.shape.num_tokens,
        "num_streams": part["num_streams"],
        "hidden": builder.model.hidden,
    }
    before = {**dims, "sinkhorn_steps": max(part["num_sinkhorn"], 1)}
    yield builder.layer("mhc_pre", "mhc_pre", before)
    yield from half
    yield builder.layer("mhc_post", "mhc_post", dims)


KIND = KindSpec(
    name="hyper_connections",
    place=Place.MODEL,
    summary="several streams of the residual, mixed before and after each half of a layer (mHC)",
    source="Xie et al., mHC, 2025; DeepSeek-V4's modelling file in transformers 5; Hy 4's (streams"
    " that do not mix) and GLM-5.3-Flash's (whose mean is the output)",
    dims=(
        KindDim("num_streams", "streams of the residual", minimum=2),
        KindDim("num_sinkhorn", "steps that balance the mixture; 0: streams do not mix", 20),
        KindDim("has_head", "1: weights of their own join the streams at the end; 0: the mean", 1),
    ),
    weights=_weights,
    around=_around,
    approximated="streams that do not mix take the time of some that do, with one step",
    untrained="how its mixing keeps several streams for a backward pass is not known here",
)
