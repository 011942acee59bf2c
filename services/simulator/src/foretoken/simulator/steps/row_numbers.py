"""Rows of columns that are alike, numbered."""

from collections.abc import Sequence

import numpy as np

from foretoken.simulator.grid import Ints

# A table of up to so many entries per value takes less time than sorting the values.
_TABLE_RATIO = 16


def number_rows(columns: Sequence[np.ndarray]) -> tuple[Ints, Ints]:
    """Return the first row of every distinct combination of columns, and the number of each row's.

    Values are integers or flags, and not negative. Numbers are in the order of the combinations,
    where the first column counts most.
    """
    number, width = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        own = np.asarray(column, dtype=np.int64)
        own_width = int(own.max(initial=0)) + 1
        if width * own_width > _TABLE_RATIO * len(number):
            number, width = _rank(number, width)
            own, own_width = _rank(own, own_width)
        number = number * own_width + own
        width *= own_width
    number, width = _rank(number, width)
    first = np.zeros(width, dtype=np.int64)
    # Of the rows that have a number the last one written stays: the first.
    first[number[::-1]] = np.arange(len(number) - 1, -1, -1)
    return first, number


def _rank(values: Ints, width: int) -> tuple[Ints, int]:
    """Return the place of each value, below `width`, among those there are, and how many are."""
    if width > _TABLE_RATIO * len(values) or not len(values):
        distinct, ranks = np.unique(values, return_inverse=True)
        return ranks, len(distinct)
    is_there = np.zeros(width, dtype=np.bool_)
    is_there[values] = True
    places: Ints = np.cumsum(is_there) - 1
    return places[values], int(places[-1]) + 1
