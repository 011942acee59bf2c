"""Residual streams of earlier blocks that a layer attends to (Kimi K3)."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights


def _weights(_: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    # A query and a norm for each half of a layer.
    yield Weights(total=2 * model.num_layers * 2 * model.hidden)


KIND = KindSpec(
    name="residual_attention",
    place=Place.MODEL,
    summary="each half of a layer mixes the outputs of earlier blocks of layers",
    source="Kimi Team, Attention Residuals, 2026; Kimi K3's config.json (`attn_res_block_size`)",
    dims=(KindDim("block_size", "halves of layers in a block", minimum=1),),
    weights=_weights,
    untrained="its mixing has no operators, and keeps the output of every block",
    approximated="its mixing takes no time of its own",
)
