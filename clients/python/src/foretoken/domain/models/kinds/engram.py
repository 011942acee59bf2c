"""Memory of n-grams (Engram): rows of large tables by hashes of the last tokens, in some layers."""

import dataclasses
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

# A row has a byte a feature, and a scale of a byte for 32.
_ROW_BITS = 8 + 8 / 32


def _projection(d: Dims, hidden: int) -> tuple[int, int]:
    """Return the features into and out of the product that makes a key of every stream, a value."""
    return d["columns"] * d["width"], (d["num_streams"] + 1) * hidden


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    into, out = _projection(d, model.hidden)
    read = d["num_layers"] * into
    yield Weights(total=d["rows"] * d["width"], active=read, bits=_ROW_BITS)
    yield Weights(total=d["num_layers"] * into * out, part="latent")
    # What queries and keys of a stream are weighed by.
    yield Weights(total=d["num_layers"] * 2 * d["num_streams"] * model.hidden)


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    part = next(iter(parts))
    tokens, section = builder.shape.num_tokens, Section.EMBEDDING
    num_rows = tokens * part["columns"] * part["num_layers"]
    dims = {"num_tokens": num_rows, "hidden": part["width"], "vocab": part["rows"]}
    node = builder.node("engram_lookup", section, "embedding", dims, Partition.VOCAB)
    yield dataclasses.replace(node, weight_bits=_ROW_BITS)
    into, out = _projection(part.dims, builder.model.hidden)
    node = builder.layer("engram_proj", "gemm", {"m": tokens, "n": out, "k": into})
    node = builder.stored(node, builder.quantization.weight_of("latent"))
    yield node.in_layers(range(part["num_layers"]))


KIND = KindSpec(
    name="engram",
    place=Place.MODEL,
    summary="memory of n-grams: rows of tables by hashes of the last tokens (Engram)",
    source="DeepSeek, Engram, 2026; DeepSeek-V4.1-Flash's config.json and the tensors of its"
    " checkpoint as llama.cpp's loader of `deepseek41` names them",
    dims=(
        KindDim("num_layers", "layers that read a table", minimum=1),
        KindDim("rows", "rows of all tables", minimum=1),
        KindDim("width", "features of a row", minimum=1),
        KindDim("columns", "rows that a token reads in a layer", minimum=1),
        KindDim("num_streams", "streams of the residual, each with a key", 1, 1),
    ),
    weights=_weights,
    lower=_lower,
    approximated="tables lie in the devices' memory, in 8 bits, and its layers are the first ones;"
    " gates and hashes take no time",
    untrained="how its tables are updated is not known here",
)
