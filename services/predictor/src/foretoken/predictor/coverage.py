"""How well the measured points of a series surround a call."""

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretoken.domain.operator import OperatorSpec
from foretoken.predictor.features import CONFIGURATION_DIMS, Design
from foretoken.predictor.neighbours import Neighbours

# A call further than a factor of two from every measured point, in any dimension, is not
# surrounded by them: power-of-two sweeps leave at most half of that.
_NEAR_OCTAVES = 1.0


class Tier(enum.IntEnum):
    """How far a call is from what was measured; intervals are calibrated for each apart."""

    GRID = 0
    NEW_CONFIGURATION = 1
    BEYOND = 2


@dataclass(frozen=True, slots=True)
class CoverageMap:
    """Range of every dimension and the configurations seen, as sorted row codes."""

    low: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]
    configurations: npt.NDArray[np.int64]
    configuration_columns: tuple[int, ...]

    def tiers(self, design: Design, neighbours: Neighbours) -> npt.NDArray[np.int64]:
        """Return the tier of every call."""
        is_inside = ((design.points >= self.low) & (design.points <= self.high)).all(axis=1)
        is_near = neighbours.distance_octaves <= _NEAR_OCTAVES
        asked = design.points[:, self.configuration_columns]
        is_known = np.isin(_as_rows(asked), _as_rows(self.configurations))
        tiers = np.where(is_known, Tier.GRID, Tier.NEW_CONFIGURATION)
        return np.where(is_inside & is_near, tiers, Tier.BEYOND)


def configuration_columns(spec: OperatorSpec) -> tuple[int, ...]:
    """Return which dimensions, by position, make the configuration."""
    return tuple(i for i, name in enumerate(spec.dim_names) if name in CONFIGURATION_DIMS)


def map_coverage(spec: OperatorSpec, points: npt.NDArray[np.int64]) -> CoverageMap:
    """Return the coverage of measured points."""
    columns = configuration_columns(spec)
    return CoverageMap(
        points.min(axis=0), points.max(axis=0), np.unique(points[:, columns], axis=0), columns
    )


def _as_rows(matrix: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Return each row as one opaque value, so that rows can be looked up whole."""
    rows = np.ascontiguousarray(matrix)
    if rows.shape[1] == 0:
        return np.zeros(len(rows), dtype="V1")
    return rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).reshape(-1)
