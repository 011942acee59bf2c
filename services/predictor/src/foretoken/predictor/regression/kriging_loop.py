"""The inner loop of kriging: one small system of equations per call, several calls at a time.

Each step is done for a block of calls side by side, which processors do in a few instructions.
"""

import numpy as np
import numpy.typing as npt

from foretoken.predictor.regression.jit import compiled

_Floats = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.int64]

# Calls side by side: two registers of eight numbers, or four of four.
_WIDTH = 16
# Keeps the factorisation of coinciding points finite.
_TINY = 1e-12
# Beyond it exp(-x) is nothing.
_LARGEST = 40.0


@compiled
def _correlate(near: _Floats, i: int, j: int, system: _Floats, scaled: _Floats) -> None:
    """Set a block of entries (i, j) to the Matérn 3/2 correlations of places (i or j, axis).

    exp(-x) is the series to the 7th power of a 64th, squared six times: within 1e-13, and unlike
    the library's function done for calls side by side. Written out, as loops would undo that.
    """
    _, num_axes, width = near.shape
    for lane in range(width):
        scaled[lane] = 0.0
    for axis in range(num_axes):
        for lane in range(width):
            apart = near[i, axis, lane] - near[j, axis, lane]
            scaled[lane] += apart * apart
    for lane in range(width):
        distance = np.sqrt(3.0 * scaled[lane])
        x = min(distance, _LARGEST) * -(1.0 / 64.0)
        high = 1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0 + x * (1.0 / 5040.0)))
        total = 1.0 + x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * high)))
        total *= total
        total *= total
        total *= total
        total *= total
        total *= total
        total *= total
        system[i, j, lane] = (1.0 + distance) * total


@compiled
def _eliminate(system: _Floats, inverse: _Floats) -> None:
    """Replace a block of systems (rows, columns, calls) by their Cholesky factors.

    Rows below the square are right-hand sides, and become the solutions of the lower triangle.
    `inverse` takes one over the diagonal.
    """
    num_rows, count, width = system.shape
    for i in range(num_rows):
        for j in range(min(i + 1, count)):
            for k in range(j):
                for lane in range(width):
                    system[i, j, lane] -= system[i, k, lane] * system[j, k, lane]
            if i == j:
                for lane in range(width):
                    inverse[j, lane] = 1.0 / np.sqrt(max(system[j, j, lane], _TINY))
            for lane in range(width):
                system[i, j, lane] *= inverse[j, lane]


@compiled
def _gather(places: _Floats, calls: _Floats, neighbours: _Integers, near: _Floats) -> None:
    """Set the places of a block, those of the calls last."""
    count = neighbours.shape[1]
    for lane in range(near.shape[2]):
        # The last block is filled up with its last call.
        call = min(lane, len(calls) - 1)
        for axis in range(places.shape[1]):
            near[count, axis, lane] = calls[call, axis]
            for i in range(count):
                near[i, axis, lane] = places[neighbours[call, i], axis]


@compiled
def _conclude(system: _Floats, lane: int, nugget: float) -> tuple[float, float]:
    """Return the estimate of one call of an eliminated block, and its variance."""
    count = system.shape[1]
    cc = co = oo = cv = ov = 0.0
    for i in range(count):
        c, o, v = system[count, i, lane], system[count + 1, i, lane], system[count + 2, i, lane]
        cc += c * c
        co += c * o
        oo += o * o
        cv += c * v
        ov += o * v
    level = ov / oo
    return level + cv - level * co, max(1.0 + nugget - cc + (1.0 - co) ** 2 / oo, _TINY)


@compiled
def krige_many(
    places: _Floats, values: _Floats, calls: _Floats, neighbours: _Integers, nugget: float
) -> tuple[_Floats, _Floats]:
    """Return what `krige` does."""
    num_calls, count = neighbours.shape
    mean, variance = np.empty(num_calls), np.empty(num_calls)
    near = np.empty((count + 1, places.shape[1], _WIDTH))
    # Below the square: correlations with the call, ones, values.
    system = np.zeros((count + 3, count, _WIDTH))
    inverse, scaled = np.empty((count, _WIDTH)), np.empty(_WIDTH)
    for start in range(0, num_calls, _WIDTH):
        rows = neighbours[start : start + _WIDTH]
        _gather(places, calls[start : start + _WIDTH], rows, near)
        for i in range(count + 1):
            for j in range(min(i, count)):
                _correlate(near, i, j, system, scaled)
        system[count + 1] = 1.0
        for i in range(count):
            system[i, i] = 1.0 + nugget
            for lane in range(len(rows)):
                system[count + 2, i, lane] = values[rows[lane, i]]
        _eliminate(system, inverse)
        for lane in range(len(rows)):
            mean[start + lane], variance[start + lane] = _conclude(system, lane, nugget)
    return mean, variance
