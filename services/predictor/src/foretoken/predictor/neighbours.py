"""Look up the measured points around a call."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretoken.predictor.features import Design
from foretoken.predictor.nearest import NearestPoints
from foretoken.predictor.roofline import FloatColumn

_NUM_NEIGHBOURS = 4


@dataclass(frozen=True, slots=True)
class Neighbours:
    """For each call its nearest points, the nearest first, as row numbers.

    `exact` is the row of the very same point, or -1. `distance_octaves` is how far the nearest
    point is in the dimension that differs most, in factors of two.
    """

    rows: npt.NDArray[np.int64]
    exact: npt.NDArray[np.int64]
    distance_octaves: FloatColumn


class PointIndex:
    """The points of a series in log space."""

    def __init__(self, points: npt.NDArray[np.int64]) -> None:
        """Keep the points."""
        self._points = points
        self._log_points = np.log2(1.0 + points)
        self._nearest = NearestPoints(self._log_points)

    def find(self, design: Design) -> Neighbours:
        """Return the neighbours of every call."""
        num_neighbours = min(_NUM_NEIGHBOURS, len(self._points))
        rows = self._nearest.find(design.log_points, num_neighbours)
        nearest = rows[:, 0]
        offset = np.abs(self._log_points[nearest] - design.log_points).max(axis=1)
        is_same = (self._points[nearest] == design.points).all(axis=1)
        return Neighbours(
            rows=rows,
            exact=np.where(is_same, nearest, -1),
            distance_octaves=offset,
        )
