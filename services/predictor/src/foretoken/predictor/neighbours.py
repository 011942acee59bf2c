"""Look up the measured points around calls, the same ones however many are looked up together."""

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.regression.light_imports import TREE_MODULE, nearest_tree
from foretoken.predictor.roofline import FloatColumn, IntColumn

# The first calls are compared with every point: importing what makes the tree takes a sixth of a
# second. Once that is there, making the tree takes as long as some ten calls compared.
_MAX_COMPARED_CALLS, _MAX_COMPARED_WITH_TREE_CALLS = 64, 8
# Of calls far from the grid many points are about equally far: leaves of 32 and cells as they are
# cut find them in a third of the time of leaves of 16 and cells shrunk to their points.
_LEAF_SIZE = 32
# Points of a grid are equally near to many calls. Each is shifted by an amount of its own, far
# below what sizes differ by and far above rounding, so that one of them is the nearest.
_SHIFT = 1e-9
# Multiples of its powers fill every axis evenly, each in an order of its own.
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0


class NearestPoints:
    """Points (rows) by their places along axes (columns)."""

    def __init__(self, places: Matrix) -> None:
        """Keep the places; what searches them is made when it is first needed."""
        numbers = np.arange(1.0, len(places) + 1.0)[:, None]
        steps = _GOLDEN ** np.arange(1.0, places.shape[1] + 1.0)
        # Column by column: sums over an axis of a few places take ten times as long.
        self._places = np.asfortranarray(places + _SHIFT * (numbers * steps % 1.0))
        self._num_calls = 0

    def find(self, calls: Matrix, count: int) -> IntColumn:
        """Return the rows of the `count` nearest points of every call, the nearest first."""
        self._num_calls += len(calls)
        has_tree = TREE_MODULE in sys.modules
        if self._num_calls > (_MAX_COMPARED_WITH_TREE_CALLS if has_tree else _MAX_COMPARED_CALLS):
            _, rows = self._tree.query(calls, k=count)
            return np.asarray(rows, dtype=np.int64).reshape(len(calls), count)
        found = np.empty((len(calls), count), dtype=np.int64)
        for place, call in enumerate(calls):
            distance = np.zeros(len(self._places))
            for column, own in zip(self._places.T, call.tolist(), strict=True):
                distance += (column - own) ** 2
            near = np.argpartition(distance, count - 1)[:count]
            found[place] = near[np.argsort(distance[near], kind="stable")]
        return found

    @cached_property
    def _tree(self) -> Any:
        return nearest_tree(
            self._places, leafsize=_LEAF_SIZE, balanced_tree=False, compact_nodes=False
        )


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
