"""Norms with a gate of a low rank (A.X K2)."""

from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    Placed,
    Weights,
)


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    num_norms = 2 * model.num_layers - d["num_dense"]
    yield Weights(total=num_norms * 2 * model.hidden * d["rank"])


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    ((part, layers),) = parts.items()
    tokens, hidden, rank = builder.shape.num_tokens, builder.model.hidden, part["rank"]
    for before, held in (("attention", layers), ("mlp", layers[part["num_dense"] :])):
        if not held:
            continue
        for role, n, k in (("in", rank, hidden), ("out", hidden, rank)):
            dims = {"m": tokens, "n": n, "k": k}
            name = f"{before}_norm_gate_{role}_proj"
            node = builder.layer(name, "gemm", dims)
            yield node.in_layers(held)


KIND = KindSpec(
    name="gated_norms",
    place=Place.MODEL,
    summary="norms whose output is gated by a network of a low rank",
    source="A.X K2's modelling file in transformers 5 (`AXK2GatedRMSNorm`)",
    dims=(
        KindDim("rank", "features inside the gate", minimum=1),
        KindDim("num_dense", "first layers whose second norm has no gate", 0),
    ),
    weights=_weights,
    lower=_lower,
    approximated="the gate's sigmoid and product take no time of their own",
    untrained="what a backward pass keeps of the gates is not known here",
)
