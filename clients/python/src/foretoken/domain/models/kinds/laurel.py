"""A product of a low rank next to attention that joins the residual (LAuReL)."""

from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode, Section
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
    yield Weights(total=model.num_layers * model.hidden * (2 * d["rank"] + 1))


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    rank, hidden = next(iter(parts))["rank"], builder.model.hidden
    tokens = builder.shape.num_tokens
    for role, n, k in (("laurel_in_proj", rank, hidden), ("laurel_out_proj", hidden, rank)):
        dims = {"m": tokens, "n": n, "k": k}
        yield builder.layer(role, "gemm", dims)
    yield builder.norm("laurel_norm", Section.LAYER, tokens)


KIND = KindSpec(
    name="laurel",
    place=Place.MODEL,
    summary="a product of a low rank next to attention, added to the residual (LAuReL)",
    source="Menghani et al., LAuReL, 2024; Gemma 3n's modelling file in transformers 5",
    dims=(KindDim("rank", "features inside it", minimum=1),),
    weights=_weights,
    lower=_lower,
    untrained="it is not known here what its products keep for a backward pass",
)
