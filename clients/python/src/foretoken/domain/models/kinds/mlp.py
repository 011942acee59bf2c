"""The dense feed-forward half of a layer, with a gate or without."""

from collections.abc import Iterator

from foretoken.domain.lowering.graph import OperatorNode, Partition
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.training_layer import lower_training_mlp
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Placed, Weights


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    up_width = (1 + d["is_gated"]) * d["intermediate"]
    yield Weights(total=model.hidden * (up_width + d["intermediate"]), part="mlp")
    yield Weights(total=d["has_bias"] * (up_width + model.hidden))


def lower_mlp(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    """Yield the products of the layers and the activation between them."""
    part, tokens, hidden = next(iter(parts)), builder.shape.num_tokens, builder.model.hidden
    if builder.options.training is not None:
        yield from lower_training_mlp(builder, part)
        return
    weight = builder.quantization.mlp
    dims = {"m": tokens, "n": (1 + part["is_gated"]) * part["intermediate"], "k": hidden}
    yield builder.projection("mlp_up_proj", dims, Partition.COLUMN, weight)
    operator = "silu_mul" if part["is_gated"] else "gelu"
    dims = {"num_tokens": tokens, "intermediate": part["intermediate"]}
    yield builder.layer("mlp_activation", operator, dims, Partition.WIDTH)
    dims = {"m": tokens, "n": hidden, "k": part["intermediate"]}
    yield builder.projection("mlp_down_proj", dims, Partition.ROW, weight)


KIND = KindSpec(
    name="mlp",
    place=Place.FEED_FORWARD,
    summary="dense feed-forward network",
    source="Vaswani et al., 2017; Shazeer, GLU variants, 2020 (the gate)",
    dims=(
        KindDim("intermediate", "features between its products", minimum=1),
        KindDim("is_gated", "1: a gate next to the up projection", 1),
        KindDim("has_bias", "1: projections have a bias", 0),
    ),
    weights=_weights,
    lower=lower_mlp,
    backward="two products for each: the gradients of input and weight",
    matrices={"mlp": ("mlp.up_proj", "mlp.down_proj")},
)
