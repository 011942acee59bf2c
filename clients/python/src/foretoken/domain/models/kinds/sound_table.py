"""Frames of sound as sums of rows of a table, one for each band of frequencies (Inkling)."""

from collections.abc import Iterator

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Dims, KindDim, KindSpec, Place, Weights


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    yield Weights(total=(d["rows"] + 1) * model.hidden, active=0)


KIND = KindSpec(
    name="sound_table",
    place=Place.MODEL,
    summary="a table of how loud each band of a frame of sound is",
    source="Inkling's modelling file in transformers 5",
    dims=(KindDim("rows", "rows: bands times levels of loudness", minimum=1),),
    weights=_weights,
    backward="none of its own: text is trained on, which it hears nothing of",
    approximated="counted, and not run: how long a token of sound is no file of the model says",
)
