"""Find the nearest of many points, the same ones however many calls are looked up together."""

from functools import cached_property
from typing import Any

import numpy as np

from foretoken.predictor.features import Matrix
from foretoken.predictor.roofline import IntColumn

# The first calls are compared with every point: importing what makes the tree takes a third of a
# second, and making it as long as hundreds of calls.
_MAX_COMPARED_CALLS = 64
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
        if self._num_calls > _MAX_COMPARED_CALLS:
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
        from scipy.spatial import cKDTree  # type: ignore[import-untyped]

        return cKDTree(self._places, balanced_tree=False)
