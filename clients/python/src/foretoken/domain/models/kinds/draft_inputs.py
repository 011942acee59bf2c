"""What a drafting head takes more than a layer does: features of the model it drafts for."""

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


def _widths(d: Dims, model: ModelArchitecture) -> tuple[int, int]:
    """Return the features that are merged, and those of queries, keys and values together."""
    heads = model.num_heads + 2 * model.num_kv_heads
    return d["num_features"] * d["target_hidden"], heads * model.head_dim


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    merged, projected = _widths(d, model)
    # The layer's own input has as many features again, with a norm.
    yield Weights(total=model.hidden * (merged + projected + 1))


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    ((part, _),) = parts.items()
    tokens, hidden = builder.shape.num_tokens, builder.model.hidden
    merged, projected = _widths(part.dims, builder.model)
    dims = {"m": tokens, "n": hidden, "k": merged}
    yield builder.node("draft_merge_proj", Section.EMBEDDING, "gemm", dims)
    yield builder.norm("draft_input_norm", Section.LAYER, tokens)
    dims = {"m": tokens, "n": projected, "k": hidden}
    yield builder.layer("draft_input_proj", "gemm", dims, Partition.COLUMN)


KIND = KindSpec(
    name="draft_inputs",
    place=Place.MODEL,
    summary="features of the model that a head drafts for, merged and joined to its tokens (EAGLE)",
    source="Li et al., EAGLE-3, 2025, section 3; SGLang, models/llama_eagle3.py (a layer's"
    " projections of both, next to each other)",
    dims=(
        KindDim("num_features", "layers whose outputs are merged", 3, minimum=1),
        KindDim("target_hidden", "features of each", minimum=1),
    ),
    weights=_weights,
    lower=_lower,
    approximated="the features are merged anew for every token that is drafted, where an engine"
    " merges those of verified tokens alone; the table of its tokens, which is the model's, counts"
    " with the rows of its head",
    untrained="it is trained with the model it drafts for, which is not simulated",
)
