"""Answer many rows by trees at once, from tables made of them.

Every threshold of a feature rules out, in every tree, the leaves on one side of it. What is ruled
out by the range that a feature lies in is one bit per leaf, known beforehand: a row reaches the
first leaf that none of its features rules out.
Source: Lucchese et al., QuickScorer: a fast algorithm to rank documents with additive ensembles of
regression trees (2015), with one table per range in place of a scan of the thresholds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretoken.predictor.config import MAX_LEAVES
from foretoken.predictor.features import Matrix
from foretoken.predictor.regression.forest import Forest, split_trees
from foretoken.predictor.roofline import FloatColumn, IntColumn

# A mask has 32 bits.
_ALL = 0xFFFFFFFF
# A word with only bit i set, times this number, has a different number in its upper five bits for
# every i: the leaf's slot. Source: Leiserson, Prokop and Randall, Using de Bruijn sequences to
# index a 1 in a computer word (1998).
SLOT_FACTOR, SLOT_SHIFT = 0x077CB531, 27


@dataclass(frozen=True, slots=True)
class TreeEngine:
    """Tables of a model; its features must be finite.

    `thresholds` are those of every feature in turn, ascending, from `starts[f]` to `starts[f + 1]`.
    `masks` has the leaves left (one bit each) by range (rows, one more per feature than there are
    thresholds) and tree; `lines` by tree and slot the slopes of `columns`, then the constant.
    """

    thresholds: FloatColumn
    starts: IntColumn
    masks: npt.NDArray[np.uint32]
    lines: npt.NDArray[np.float32]
    columns: IntColumn

    @property
    def num_features(self) -> int:
        """Number of features that a row has."""
        return len(self.starts) - 1

    def predict(self, features: Matrix) -> FloatColumn:
        """Return one value per row.

        Raises:
            ValueError: rows of another number of features.

        """
        # Compiling takes seconds, and importing the compiler a part of one.
        from foretoken.predictor.regression.tree_loop import add_up

        if features.shape[1] != self.num_features:
            raise ValueError(f"rows of {features.shape[1]} features, not {self.num_features}")
        rows = np.ascontiguousarray(features, dtype=np.float64)
        return add_up(rows, self.thresholds, self.starts, self.masks, self.lines, self.columns)


def build_engine(forest: Forest) -> TreeEngine:
    """Return the engine of trees."""
    num_trees, num_features = len(forest.num_leaves), int(forest.num_features)
    thresholds, starts, cuts = _cut(forest, num_features)
    masks = np.full((num_trees, starts[-1] + num_features), _ALL, dtype=np.uint32)
    parts = (split_trees(forest, values) for values in (forest.left, forest.right, cuts))
    for left, right, own_cuts, own_masks in zip(*parts, masks, strict=True):
        if len(left):
            _rule_out(left.tolist(), right.tolist(), own_cuts.tolist(), own_masks)
    columns = np.unique(forest.slope_feature).astype(np.int64)
    lines = _tabulate_lines(forest, columns)
    return TreeEngine(thresholds, starts, np.ascontiguousarray(masks.T), lines, columns)


def _cut(forest: Forest, num_features: int) -> tuple[FloatColumn, IntColumn, IntColumn]:
    """Return thresholds and starts, and three rows of masks per node.

    Rows from the first to the second go left at the node, and from there to the third go right.
    """
    cuts = np.empty((len(forest.feature), 3), dtype=np.int64)
    by_feature: list[FloatColumn] = []
    starts = np.zeros(num_features + 1, dtype=np.int64)
    for feature in range(num_features):
        is_own = forest.feature == feature
        values = forest.threshold[is_own].astype(np.float64)
        own, place = np.unique(values, return_inverse=True)
        first = starts[feature] + feature
        cuts[is_own] = first + np.stack(np.broadcast_arrays(0, place + 1, len(own) + 1), axis=1)
        by_feature.append(own)
        starts[feature + 1] = starts[feature] + len(own)
    return np.concatenate(by_feature), starts, cuts


def _rule_out(
    left: Sequence[int],
    right: Sequence[int],
    cuts: Sequence[Sequence[int]],
    masks: npt.NDArray[np.uint32],
    node: int = 0,
) -> int:
    """Clear in a tree's masks the leaves that nodes from one on rule out; return its leaves."""
    if node < 0:
        return 1 << ~node
    on_left = _rule_out(left, right, cuts, masks, left[node])
    on_right = _rule_out(left, right, cuts, masks, right[node])
    first, middle, end = cuts[node]
    masks[first:middle] &= np.uint32(_ALL & ~on_right)
    masks[middle:end] &= np.uint32(_ALL & ~on_left)
    return on_left | on_right


def _tabulate_lines(forest: Forest, columns: IntColumn) -> npt.NDArray[np.float32]:
    num_trees, starts = len(forest.num_leaves), forest.leaf_starts
    tree = np.repeat(np.arange(num_trees), forest.num_leaves)
    slots = ((SLOT_FACTOR << np.arange(MAX_LEAVES)) & _ALL) >> SLOT_SHIFT
    slot = slots[np.arange(starts[-1]) - starts[tree]]
    lines = np.zeros((num_trees, MAX_LEAVES, len(columns) + 1), dtype=np.float32)
    lines[tree, slot, -1] = forest.constant
    leaf, place = forest.slope_leaves, np.searchsorted(columns, forest.slope_feature)
    lines[tree[leaf], slot[leaf], place] = forest.slope
    return lines
