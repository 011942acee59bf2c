"""Answer many rows by trees at once, from tables made of LightGBM's text.

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

from foretoken.predictor.features import Matrix
from foretoken.predictor.regression.tree_text import TreeText, read_num_features, read_trees
from foretoken.predictor.roofline import FloatColumn, IntColumn

# A mask has 32 bits.
MAX_LEAVES = 32
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
    lines: npt.NDArray[np.float64]
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

    def draw_rows(self, count: int) -> Matrix:
        """Return rows in the middle of ranges, to compare answers on.

        LightGBM reads thresholds to within one bit: on one of them it may go another way.
        """
        rng = np.random.default_rng(0)
        rows = np.zeros((count, self.num_features))
        for feature in range(self.num_features):
            own = self.thresholds[self.starts[feature] : self.starts[feature + 1]]
            if len(own):
                ends = np.array([own[0] - 1.0, *own, own[-1] + 1.0])
                rows[:, feature] = rng.choice((ends[1:] + ends[:-1]) / 2.0, count)
        return rows


def build_engine(text: str) -> TreeEngine:
    """Return the engine of a model.

    Raises:
        ValueError: a tree has more leaves than fit, categories, or zeros for missing values.

    """
    num_features, trees = read_num_features(text), list(read_trees(text))
    if max(tree.num_leaves for tree in trees) > MAX_LEAVES:
        raise ValueError(f"trees of more than {MAX_LEAVES} leaves")
    thresholds, starts, cuts = _cut(trees, num_features)
    masks = np.full((len(trees), starts[-1] + num_features), _ALL, dtype=np.uint32)
    for tree, own_cuts, own_masks in zip(trees, cuts, masks, strict=True):
        if tree.num_leaves > 1:
            _rule_out(tree.left.tolist(), tree.right.tolist(), own_cuts.tolist(), own_masks)
    columns = np.unique(np.concatenate([tree.line_feature for tree in trees]))
    lines = _tabulate_lines(trees, columns)
    return TreeEngine(thresholds, starts, np.ascontiguousarray(masks.T), lines, columns)


def _cut(
    trees: Sequence[TreeText], num_features: int
) -> tuple[FloatColumn, IntColumn, list[IntColumn]]:
    """Return thresholds and starts, and three rows of masks per node of every tree.

    Rows from the first to the second go left at the node, and from there to the third go right.
    """
    features = np.concatenate([tree.feature for tree in trees])
    values = np.concatenate([tree.threshold for tree in trees])
    cuts = np.empty((len(features), 3), dtype=np.int64)
    by_feature: list[FloatColumn] = []
    starts = np.zeros(num_features + 1, dtype=np.int64)
    for feature in range(num_features):
        is_own = features == feature
        own, place = np.unique(values[is_own], return_inverse=True)
        first = starts[feature] + feature
        cuts[is_own] = first + np.stack(np.broadcast_arrays(0, place + 1, len(own) + 1), axis=1)
        by_feature.append(own)
        starts[feature + 1] = starts[feature] + len(own)
    ends = np.cumsum([len(tree.feature) for tree in trees])
    return np.concatenate(by_feature), starts, np.split(cuts, ends[:-1])


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


def _tabulate_lines(trees: Sequence[TreeText], columns: IntColumn) -> npt.NDArray[np.float64]:
    lines = np.zeros((len(trees), MAX_LEAVES, len(columns) + 1))
    slots = ((SLOT_FACTOR << np.arange(MAX_LEAVES)) & _ALL) >> SLOT_SHIFT
    for tree, own in zip(trees, lines, strict=True):
        own[slots[: tree.num_leaves], -1] = tree.constant
        places = np.searchsorted(columns, tree.line_feature)
        own[slots[tree.line_leaf], places] = tree.slope
    return lines
