"""The trees of a model as flat arrays: what LightGBM's text says, what is stored, what answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.predictor.config import MAX_LEAVES
from foretoken.predictor.features import Matrix
from foretoken.predictor.roofline import FloatColumn, IntColumn

# Bits of `decision_type`. Source: LightGBM, include/LightGBM/tree.h, version 4.
_CATEGORICAL_BIT, _MISSING_SHIFT, _MISSING_BITS, _ZERO_IS_MISSING = 1, 2, 3, 1
# Slopes are penalised, and small: rounded to 11 bits they move an answer by less than 0.1 %.
_STORED = {
    "num_features": np.uint16,
    "num_leaves": np.uint8,
    "feature": np.uint8,
    "left": np.int8,
    "right": np.int8,
    "constant": np.float32,
    "num_slopes": np.uint8,
    "slope_feature": np.uint8,
    "slope": np.float16,
}

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Forest:
    """Trees one after the other, by node and by leaf.

    At node `i` a row goes to `left[i]` if its `feature[i]` is at most `threshold[i]`; children are
    numbered within their tree, and one below 0 is the leaf `~child`. Leaf `j` adds `constant[j]`
    and the next `num_slopes[j]` of `slope` times `slope_feature`.
    """

    num_features: _Array
    num_leaves: _Array
    feature: _Array
    threshold: _Array
    left: _Array
    right: _Array
    constant: _Array
    num_slopes: _Array
    slope_feature: _Array
    slope: _Array

    def to_arrays(self, name: str) -> Mapping[str, _Array]:
        """Return what is stored, under a name: rounded."""
        thresholds, place = np.unique(np.float32(self.threshold), return_inverse=True)
        stored = {field: np.asarray(getattr(self, field), kind) for field, kind in _STORED.items()}
        # Trees share thresholds: each is stored once.
        stored |= {"thresholds": thresholds, "place": place.astype(np.uint16)}
        return {f"{name}.{field}": array for field, array in stored.items()}

    @classmethod
    def from_arrays(cls, name: str, arrays: Mapping[str, _Array]) -> "Forest":
        """Return the trees from what is stored under a name."""
        threshold = arrays[f"{name}.thresholds"][arrays[f"{name}.place"]]
        return cls(threshold=threshold, **{field: arrays[f"{name}.{field}"] for field in _STORED})

    def rounded(self) -> "Forest":
        """Return the trees as they are after being stored."""
        return Forest.from_arrays("", self.to_arrays(""))

    @property
    def leaf_starts(self) -> IntColumn:
        """The first leaf of every tree, and the number of all; a tree has one node less."""
        return np.concatenate([[0], np.cumsum(self.num_leaves, dtype=np.int64)])

    @property
    def slope_leaves(self) -> IntColumn:
        """The leaf of every slope."""
        return np.repeat(np.arange(len(self.constant)), self.num_slopes)

    def predict(self, features: Matrix) -> FloatColumn:
        """Return one value per row, of a few rows, by walking all trees at once."""
        root, left, right, slopes = self._walk
        rows = np.arange(len(features))[:, None]
        node = np.tile(root, (len(features), 1))
        while (is_inside := node >= 0).any():
            here = np.maximum(node, 0)
            goes_left = features[rows, self.feature[here]] <= self.threshold[here]
            node = np.where(is_inside, np.where(goes_left, left[here], right[here]), node)
        leaf = ~node
        constant = self.constant[leaf].sum(axis=1, dtype=np.float64)
        slope = slopes[leaf].sum(axis=1, dtype=np.float64)
        return np.asarray(constant + (slope * features).sum(axis=1))

    @cached_property
    def _walk(self) -> tuple[IntColumn, IntColumn, IntColumn, Matrix]:
        """Roots and children numbered over all trees, leaves below 0, and slopes by leaf."""
        trees, leaf_starts = np.arange(len(self.num_leaves)), self.leaf_starts
        node_starts = leaf_starts - np.arange(len(leaf_starts))
        root = np.where(self.num_leaves > 1, node_starts[:-1], ~leaf_starts[:-1])
        tree = np.repeat(trees, self.num_leaves.astype(np.int64) - 1)
        left, right = (
            np.where(child >= 0, node_starts[tree] + child, child - leaf_starts[tree])
            for child in (self.left, self.right)
        )
        slopes = np.zeros((len(self.constant), int(self.num_features)))
        slopes[self.slope_leaves, self.slope_feature] = self.slope
        return root, left, right, slopes


def read_forest(text: str) -> Forest:
    """Return the trees of LightGBM's text.

    Raises:
        ValueError: a tree has more than `MAX_LEAVES` leaves, splits on categories, or takes zeros
            for missing values.

    """
    head, *blocks = text.split("\nTree=")
    trees = [_read_fields(block.partition("\n\n")[0]) for block in blocks]
    decision = _integers(trees, "decision_type")
    is_missing = (decision >> _MISSING_SHIFT & _MISSING_BITS) == _ZERO_IS_MISSING
    if ((decision & _CATEGORICAL_BIT) > 0).any() or is_missing.any():
        raise ValueError("trees with categories or missing zeros")
    num_leaves = _integers(trees, "num_leaves")
    if num_leaves.max() > MAX_LEAVES:
        raise ValueError(f"trees of more than {MAX_LEAVES} leaves")
    for fields in trees:
        if fields.get("is_linear", "0") != "1":
            # A leaf without a line has none of the three.
            fields["leaf_const"] = fields["leaf_value"]
            fields["num_features"] = "0 " * int(fields["num_leaves"])
            fields["leaf_features"] = fields["leaf_coeff"] = ""
    return Forest(
        num_features=np.array(int(_read_fields(head)["max_feature_idx"]) + 1),
        num_leaves=num_leaves,
        feature=_integers(trees, "split_feature"),
        threshold=_reals(trees, "threshold"),
        left=_integers(trees, "left_child"),
        right=_integers(trees, "right_child"),
        constant=_reals(trees, "leaf_const"),
        num_slopes=_integers(trees, "num_features"),
        slope_feature=_integers(trees, "leaf_features"),
        slope=_reals(trees, "leaf_coeff"),
    )


def _read_fields(block: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in block.splitlines())
    return {name: value for name, _, value in pairs}


def split_trees(forest: Forest, values: _Array) -> Iterator[_Array]:
    """Yield what nodes have, tree by tree."""
    yield from np.split(values, np.cumsum(forest.num_leaves.astype(np.int64) - 1)[:-1])


def _integers(trees: Sequence[Mapping[str, str]], name: str) -> IntColumn:
    return _read_numbers(trees, name, np.int64)


def _reals(trees: Sequence[Mapping[str, str]], name: str) -> FloatColumn:
    return _read_numbers(trees, name, np.float64)


def _read_numbers(trees: Sequence[Mapping[str, str]], name: str, kind: type[Any]) -> _Array:
    """Return what all trees say under a name, read at once; one without splits says less."""
    text = " ".join(fields.get(name, "") for fields in trees).strip()
    return np.fromstring(text, kind, sep=" ") if text else np.empty(0, kind)
