"""Read the trees of a LightGBM model from its text."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from foretoken.predictor.roofline import FloatColumn, IntColumn

# Bits of `decision_type`. Source: LightGBM, include/LightGBM/tree.h, version 4.
_CATEGORICAL_BIT, _MISSING_SHIFT, _MISSING_BITS, _ZERO_IS_MISSING = 1, 2, 3, 1


@dataclass(frozen=True, slots=True)
class TreeText:
    """One tree: where its nodes split, and the constant and the line of every leaf.

    At node `i` a row goes to `left[i]` if its `feature[i]` is at most `threshold[i]`; a child below
    0 is the leaf `~child`. Leaf `line_leaf[i]` adds `slope[i]` times `line_feature[i]`.
    """

    feature: IntColumn
    threshold: FloatColumn
    left: IntColumn
    right: IntColumn
    constant: FloatColumn
    line_leaf: IntColumn
    line_feature: IntColumn
    slope: FloatColumn

    @property
    def num_leaves(self) -> int:
        """Number of leaves."""
        return len(self.constant)


def read_num_features(text: str) -> int:
    """Return how many features a model takes."""
    return int(_read_fields(text.partition("\n\n")[0])["max_feature_idx"]) + 1


def read_trees(text: str) -> Iterator[TreeText]:
    """Yield the trees of a model.

    Raises:
        ValueError: trees that split on categories, or for which zeros are missing values.

    """
    for block in text.split("\nTree=")[1:]:
        yield _read_tree(_read_fields(block.partition("\n\n")[0]))


def _read_fields(block: str) -> Mapping[str, str]:
    pairs = (line.partition("=") for line in block.splitlines())
    return {name: value for name, _, value in pairs}


def _read_tree(fields: Mapping[str, str]) -> TreeText:
    decision = _integers(fields, "decision_type")
    is_missing = (decision >> _MISSING_SHIFT & _MISSING_BITS) == _ZERO_IS_MISSING
    if ((decision & _CATEGORICAL_BIT) > 0).any() or is_missing.any():
        raise ValueError("trees with categories or missing zeros")
    is_linear = fields.get("is_linear", "0") == "1"
    return TreeText(
        feature=_integers(fields, "split_feature"),
        threshold=_reals(fields, "threshold"),
        left=_integers(fields, "left_child"),
        right=_integers(fields, "right_child"),
        constant=_reals(fields, "leaf_const" if is_linear else "leaf_value"),
        # A leaf without a line has none of the three.
        line_leaf=_count_out(_integers(fields, "num_features")),
        line_feature=_integers(fields, "leaf_features"),
        slope=_reals(fields, "leaf_coeff"),
    )


def _count_out(counts: IntColumn) -> IntColumn:
    """Return every number from 0 as often as its count says."""
    return np.repeat(np.arange(len(counts)), counts)


def _integers(fields: Mapping[str, str], name: str) -> IntColumn:
    return np.array(fields.get(name, "").split(), dtype=np.int64)


def _reals(fields: Mapping[str, str], name: str) -> FloatColumn:
    return np.array(fields.get(name, "").split(), dtype=np.float64)
