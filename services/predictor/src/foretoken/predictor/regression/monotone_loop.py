"""The inner loop of the monotone floor, compiled."""

import numpy as np

from foretoken.predictor.regression.jit import compiled
from foretoken.predictor.roofline import IntColumn


@compiled
def find_surpassed(
    points: IntColumn, asked: IntColumn, first: IntColumn, last: IntColumn
) -> IntColumn:
    """Return the first of rows `first` to `last` that a call equals or surpasses in every dim.

    -1 where there is none; `first` and `last` (excluded) are given per call.
    """
    found = np.full(len(asked), -1)
    for call in range(len(asked)):
        for row in range(first[call], last[call]):
            is_surpassed = True
            for dim in range(points.shape[1]):
                if points[row, dim] > asked[call, dim]:
                    is_surpassed = False
                    break
            if is_surpassed:
                found[call] = row
                break
    return found
