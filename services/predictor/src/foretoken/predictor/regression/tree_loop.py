"""The inner loop over trees: which leaf of every tree a row reaches, and the sum of their lines."""

import numpy as np
import numpy.typing as npt

from foretoken.predictor.config import MAX_LEAVES
from foretoken.predictor.regression.jit import compiled
from foretoken.predictor.regression.tree_engine import SLOT_FACTOR, SLOT_SHIFT

_Floats = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.int64]
_Lines = npt.NDArray[np.float32]
_Masks = npt.NDArray[np.uint32]
_Slots = npt.NDArray[np.uint8]

# Rows done together, so that what one tree needs is read once and stays in the nearest cache.
_NUM_ROWS = 64
_FACTOR, _SHIFT, _LAST = np.uint32(SLOT_FACTOR), np.uint32(SLOT_SHIFT), np.uint32(MAX_LEAVES - 1)
_ALL, _ONE = np.uint32(0xFFFFFFFF), np.uint32(1)


@compiled
def _find_bin(value: float, thresholds: _Floats, start: int, stop: int) -> int:
    """Return how many of some ascending thresholds are below a value."""
    low, left = start, stop - start
    while left > 0:
        half = (left + 1) >> 1
        # Without a branch: where a value lies cannot be foretold.
        low += half if thresholds[low + half - 1] < value else 0
        left -= half
    return low - start


@compiled
def _find_slots(
    row: _Floats,
    thresholds: _Floats,
    starts: _Integers,
    masks: _Masks,
    reached: _Masks,
    slots: _Slots,
) -> None:
    """Set the slot of the leaf that a row reaches in every tree; `reached` is scratch space."""
    num_trees = masks.shape[1]
    reached[:] = _ALL
    for feature in range(len(row)):
        start, stop = starts[feature], starts[feature + 1]
        if start == stop:
            continue
        # Thresholds divide a feature into one range more than there are of them.
        mask = masks[start + feature + _find_bin(row[feature], thresholds, start, stop)]
        for tree in range(num_trees):
            reached[tree] &= mask[tree]
    for tree in range(num_trees):
        left = reached[tree]
        first = left & (~left + _ONE)
        slots[tree] = ((first * _FACTOR) >> _SHIFT) & _LAST


@compiled
def add_up(
    features: _Floats,
    thresholds: _Floats,
    starts: _Integers,
    masks: _Masks,
    lines: _Lines,
    columns: _Integers,
) -> _Floats:
    """Return the sum of all trees for every row; arguments as `TreeEngine` has them.

    Slopes are added up over the trees, and multiplied with the row once.
    """
    num_rows, num_trees, width = len(features), masks.shape[1], lines.shape[2]
    found = np.empty(num_rows)
    totals = np.empty((_NUM_ROWS, width))
    slots = np.empty((_NUM_ROWS, num_trees), np.uint8)
    reached = np.empty(num_trees, np.uint32)
    for start in range(0, num_rows, _NUM_ROWS):
        count = min(_NUM_ROWS, num_rows - start)
        for row in range(count):
            _find_slots(features[start + row], thresholds, starts, masks, reached, slots[row])
        totals[:] = 0.0
        for tree in range(num_trees):
            for row in range(count):
                slot = slots[row, tree]
                for place in range(width):
                    totals[row, place] += lines[tree, slot, place]
        for row in range(count):
            total = totals[row, width - 1]
            for place in range(width - 1):
                total += totals[row, place] * features[start + row, columns[place]]
            found[start + row] = total
    return found
