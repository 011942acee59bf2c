"""Where a series' points lie: what tells whether it knows more of a call, before it is trained."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretoken.predictor.features import Design
from foretoken.predictor.intervals.coverage import CoverageMap, is_extrapolated, map_coverage
from foretoken.predictor.neighbours import PointIndex
from foretoken.predictor.roofline import FloatColumn
from foretoken.predictor.series import Series

# Points that are nearer by less, in octaves, are as far.
_NEARER_OCTAVES = 1e-6


@dataclass(frozen=True)
class Reach:
    """The points of a series, and what is made of them to look calls up."""

    series: Series

    @cached_property
    def index(self) -> PointIndex:
        """The points, to be looked up."""
        return PointIndex(self.series.points)

    @cached_property
    def coverage(self) -> CoverageMap:
        """Where the points lie."""
        return map_coverage(self.series.key.spec, self.series.points, self.series.axes)

    def is_nearer(self, design: Design, octaves: FloatColumn) -> npt.NDArray[np.bool_]:
        """Tell which calls the points surround, or are nearer to than so many octaves."""
        neighbours = self.index.find(design)
        is_around = ~is_extrapolated(self.coverage.tiers(design, neighbours))
        return is_around | (neighbours.distance_octaves < octaves - _NEARER_OCTAVES)
