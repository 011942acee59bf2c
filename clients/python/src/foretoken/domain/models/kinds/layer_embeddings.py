"""Embeddings of each token for each layer (Gemma), in addition to those at the input."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    width = model.num_layers * d["width"]
    # A token reads one row of the table.
    yield Weights(total=d["vocab"] * width, active=width)
    # From the input to all layers; in each layer a gate and a projection back, with its norms.
    yield Weights(total=model.hidden * width + d["width"])
    yield Weights(total=model.num_layers * model.hidden * (2 * d["width"] + 1))


KIND = KindSpec(
    name="layer_embeddings",
    place=Place.MODEL,
    summary="an embedding of each token for each layer",
    source="Gemma 3n's and Gemma 4's modelling files in transformers 5",
    dims=(
        KindDim("vocab", "rows of the table", minimum=1),
        KindDim("width", "features for a layer", minimum=1),
    ),
    weights=_weights,
    untrained="the products of each layer have no operators",
    approximated="the weights are held; the gate and projection of each layer take no time",
)
