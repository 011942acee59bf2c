"""Rectangular grids of points, and linear interpolation between them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def spaced_integers(low: int, high: int, per_octave: int) -> Ints:
    """Return about `per_octave` integers per doubling from `low` to `high`, both included."""
    if high <= low:
        return np.array([low], dtype=np.int64)
    num_points = int(np.ceil(np.log2(high / low) * per_octave)) + 1
    points = np.rint(np.geomspace(low, high, num_points)).astype(np.int64)
    return np.unique(points)


def cross_points(axes: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the coordinates of all grid points, flat, last axis fastest."""
    return [axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")]


def grid_corners(
    axes: Sequence[NDArray[Any]], coordinates: Sequence[Floats]
) -> Iterator[tuple[Ints, Floats]]:
    """Yield the grid points (flat) that linear interpolation at many coordinates takes, by weight.

    Coordinates outside an axis take its end.
    """
    num_coordinates = len(coordinates[0])
    corners = [(np.zeros(num_coordinates, dtype=np.int64), np.ones(num_coordinates))]
    for axis, wanted in zip(axes, coordinates, strict=True):
        lower, ratio = _locate(axis, wanted)
        upper = np.minimum(lower + 1, len(axis) - 1)
        # An axis of one point has one corner.
        sides = ((lower, 1 - ratio), (upper, ratio)) if len(axis) > 1 else ((lower, 1 - ratio),)
        corners = [
            (flat * len(axis) + index, weight * share)
            for flat, weight in corners
            for index, share in sides
        ]
    yield from corners


def interpolate(
    axes: Sequence[NDArray[Any]], values: Floats, coordinates: Sequence[Floats]
) -> Floats:
    """Return the values at many coordinates, `values` being [..., grid point]."""
    total = np.zeros((*values.shape[:-1], len(coordinates[0])))
    for flat, weight in grid_corners(axes, coordinates):
        total += values[..., flat] * weight
    return total


def _locate(axis: NDArray[Any], wanted: Floats) -> tuple[Ints, Floats]:
    points = axis.astype(np.float64)
    if len(points) == 1:
        return np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted))
    lower = np.clip(np.searchsorted(points, wanted, side="right") - 1, 0, len(points) - 2)
    ratio = (wanted - points[lower]) / (points[lower + 1] - points[lower])
    return lower, np.clip(ratio, 0.0, 1.0)
