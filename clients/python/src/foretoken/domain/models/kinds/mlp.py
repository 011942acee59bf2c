"""The dense feed-forward half of a layer, with a gate or without."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    up_width = (1 + d["is_gated"]) * d["intermediate"]
    yield Weights(total=model.hidden * (up_width + d["intermediate"]), part="mlp")
    yield Weights(total=d["has_bias"] * (up_width + model.hidden))


KIND = KindSpec(
    name="mlp",
    place=Place.FEED_FORWARD,
    summary="dense feed-forward network",
    source="Vaswani et al., 2017; Shazeer, GLU variants, 2020 (the gate)",
    dims=(
        KindDim("intermediate", "features between its products", minimum=1),
        KindDim("is_gated", "1: a gate beside the up projection", 1),
        KindDim("has_bias", "1: projections have a bias", 0),
    ),
    weights=_weights,
    has_backward=True,
    matrices={"mlp": ("mlp.up_proj", "mlp.down_proj")},
)
