"""Points that none other beats in both of two things."""

import numpy as np

from foretoken.simulator.grid import Flags, Floats


def pareto_front(larger: Floats, smaller: Floats, counts: Flags) -> Flags:
    """Return which points are on the front: large in the first, small in the second.

    One is where no other is at least as good in both and better in one. Only those that `counts`
    says are compared.
    """
    front = np.zeros(len(larger), dtype=np.bool_)
    rows = np.flatnonzero(counts)
    order = rows[np.lexsort((smaller[rows], -larger[rows]))]
    if len(order) == 0:
        return front
    # Everything before in this order is as large or larger.
    least_before = np.minimum.accumulate(np.concatenate(([np.inf], smaller[order][:-1])))
    is_least = smaller[order] < least_before
    # Equal twins of a front point are on it too.
    same = np.zeros(len(order), dtype=np.bool_)
    same[1:] = (larger[order][1:] == larger[order][:-1]) & (
        smaller[order][1:] == smaller[order][:-1]
    )
    for index in np.flatnonzero(same):
        is_least[index] = is_least[index - 1]
    front[order] = is_least
    return front
