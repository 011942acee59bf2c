"""Latency surfaces kept from one simulation to the next."""

from collections.abc import Sequence

from foretoken.simulator.cost.latency_surfaces import fetch_surfaces
from foretoken.simulator.cost.surface import LatencySurfaces, SurfaceSpec
from foretoken.simulator.kept_answers import KeptAnswers
from foretoken.simulator.latency_source import LatencySource


class SurfaceCache:
    """Latency surfaces by what they depend on and the models they rest on; see `KeptAnswers`."""

    def __init__(self, predictor: LatencySource, max_surfaces: int) -> None:
        self._predictor = predictor
        self._kept = KeptAnswers[SurfaceSpec, LatencySurfaces](predictor, max_surfaces)

    def get(self, spec: SurfaceSpec, version: str | None = None) -> LatencySurfaces:
        """Return the surfaces, from memory or from the predictor.

        `version` is that of an answer just had, left out the active model's.
        """
        (surfaces,), _ = self._kept.answer([spec], self._fetch, spec.correction, version)
        return surfaces

    def _fetch(self, specs: Sequence[SurfaceSpec]) -> tuple[Sequence[LatencySurfaces], str]:
        (spec,) = specs
        surfaces = fetch_surfaces(spec, self._predictor)
        return [surfaces], surfaces.model_version
