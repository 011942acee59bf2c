"""Embeddings of each token for each layer (Gemma), in addition to those at the input."""

from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode, Partition, Section
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
    width = model.num_layers * d["width"]
    # A token reads one row of the table.
    yield Weights(total=d["vocab"] * width, active=width)
    # From the input to all layers; in each layer a gate and a projection back, with its norms.
    yield Weights(total=model.hidden * width + d["width"])
    yield Weights(total=model.num_layers * model.hidden * (2 * d["width"] + 1))


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    """Yield what makes the inputs of all layers, and what adds its own to each layer."""
    ((part, layers),) = parts.items()
    tokens, hidden, width = builder.shape.num_tokens, builder.model.hidden, part["width"]
    wide, section = len(layers) * width, Section.EMBEDDING
    dims = {"num_tokens": tokens, "hidden": wide, "vocab": part["vocab"]}
    yield builder.node("layer_embedding", section, "embedding", dims, Partition.VOCAB)
    yield builder.node("layer_input_proj", section, "gemm", {"m": tokens, "n": wide, "k": hidden})
    dims = {"num_tokens": tokens * len(layers), "hidden": width}
    yield builder.node("layer_input_norm", section, "rms_norm", dims)
    for role, n, k in (("layer_gate_proj", width, hidden), ("layer_out_proj", hidden, width)):
        dims = {"m": tokens, "n": n, "k": k}
        yield builder.layer(role, "gemm", dims)
    dims = {"num_tokens": tokens, "intermediate": width}
    yield builder.layer("layer_activation", "silu_mul", dims)
    yield builder.norm("layer_embedding_norm", Section.LAYER, tokens)


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
    lower=_lower,
    untrained="the gradient of the table for all layers is not known here",
)
