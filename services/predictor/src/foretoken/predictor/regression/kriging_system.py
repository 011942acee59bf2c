"""Solve the systems of kriging: one per call, of the points around it."""

import numpy as np

from foretoken.predictor.features import Matrix
from foretoken.predictor.roofline import FloatColumn, IntColumn

# Up to so many calls numpy solves: a process that requests little compiles nothing.
_MAX_FEW_CALLS = 16


def krige(
    places: Matrix, values: FloatColumn, calls: Matrix, neighbours: IntColumn, nugget: float
) -> tuple[FloatColumn, FloatColumn]:
    """Return the best linear estimate of every call, and its variance in units of the sill.

    `neighbours` are rows of `places`, one row per call; `nugget` is positive. Ordinary kriging: the
    mean is unknown.
    Source: Cressie, Statistics for Spatial Data (1993), section 3.2.
    """
    if len(calls) <= _MAX_FEW_CALLS:
        return krige_few(places, values, calls, neighbours, nugget)
    # Compiling takes seconds, and importing the compiler a part of one.
    from foretoken.predictor.regression.kriging_loop import krige_many

    return krige_many(places, values, calls, neighbours, nugget)


def krige_few(
    places: Matrix, values: FloatColumn, calls: Matrix, neighbours: IntColumn, nugget: float
) -> tuple[FloatColumn, FloatColumn]:
    """Return what `krige` does."""
    near = places[neighbours]
    to_call = _matern(near - calls[:, None])
    among = _matern(near[:, :, None] - near[:, None]) + nugget * np.eye(neighbours.shape[1])
    sides = np.stack([to_call, np.ones_like(to_call), values[neighbours]], axis=2)
    products = sides.transpose(0, 2, 1) @ np.linalg.solve(among, sides)
    (cc, co, cv), (_, oo, ov) = products[:, 0].T, products[:, 1].T
    level = ov / oo
    return level + cv - level * co, 1.0 + nugget - cc + (1.0 - co) ** 2 / oo


def _matern(apart: Matrix) -> Matrix:
    """Return the Matérn 3/2 correlation of places that lie apart by vectors (…, axes)."""
    distance = np.sqrt(3.0 * (apart**2).sum(axis=-1))
    return np.asarray((1.0 + distance) * np.exp(-distance))
