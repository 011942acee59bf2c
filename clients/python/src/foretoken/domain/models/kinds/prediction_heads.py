"""Layers that predict tokens after the next (MTP), loaded where an engine speculates with them."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights


def _weights(_: Dims, _model: ModelArchitecture) -> Iterator[Weights]:
    # The published totals leave them out, and engines load them only to speculate.
    yield Weights(total=0)


KIND = KindSpec(
    name="prediction_heads",
    place=Place.MODEL,
    summary="layers that predict tokens after the next (MTP)",
    source="DeepSeek-V3, 2024, section 2.2",
    dims=(KindDim("num_modules", "layers, one for each further token", minimum=1),),
    weights=_weights,
    backward="none of its own: the main model is trained, as frameworks do by default"
    " (Megatron-Core, `--mtp-num-layers`)",
    approximated="not counted among the weights: published totals leave them out",
)
