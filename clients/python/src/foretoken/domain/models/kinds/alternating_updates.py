"""Several streams of the residual, one of which a layer computes (AltUp)."""

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
    streams, hidden = d["num_streams"], model.hidden
    # A norm and a router to the streams, what both mixtures are made of, a scale of the output.
    layer = hidden * (streams + 2) + streams**2 * (streams + 1)
    yield Weights(total=model.num_layers * layer + 2 * (streams - 1) * hidden**2)


def _lower(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    """Yield what makes the streams, mixes them in each layer, and makes one of them again."""
    streams, hidden = next(iter(parts))["num_streams"], builder.model.hidden
    tokens = builder.shape.num_tokens
    dims = {"m": tokens, "n": (streams - 1) * hidden, "k": hidden}
    yield builder.node("stream_in_proj", Section.EMBEDDING, "gemm", dims)
    for step in ("predict", "correct"):
        yield builder.norm(f"stream_{step}_norm", Section.LAYER, tokens)
        narrow = {"m": tokens, "n": streams, "k": hidden}
        role = f"stream_{step}_router"
        yield builder.layer(role, "gemm", narrow)
        wide = {"num_tokens": tokens, "hidden": streams * hidden}
        yield builder.layer(f"stream_{step}", "copy", wide)
    yield builder.node("stream_out_proj", Section.HEAD, "gemm", dims)


KIND = KindSpec(
    name="alternating_updates",
    place=Place.MODEL,
    summary="streams of the residual: a layer computes one and corrects the others (AltUp)",
    source="Baykal et al., Alternating Updates, 2023; Gemma 3n's modelling file in transformers 5",
    dims=(KindDim("num_streams", "streams of the residual", minimum=2),),
    weights=_weights,
    lower=_lower,
    approximated="predicting and correcting the streams each take the time of copying them; the"
    " router's weights count twice, once in each",
    untrained="it is not known here what its streams keep for a backward pass",
)
