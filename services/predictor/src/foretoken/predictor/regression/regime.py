"""Laws of work by regime: where a series is run by several kernels, each has a law of its own.

A regime is a range of features. One law is split in two where what it leaves over differs most, as
long as the laws of both sides are clearly nearer to the points than the one of both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.regression.work_law import MIN_LAW_ROWS, WorkLaw, fit_work_law
from foretoken.predictor.roofline import FloatColumn, IntColumn

# At most so many splits one under the other, each with so many points on either side at least.
_MAX_DEPTH, _MIN_ROWS = 2, 200
# Two laws have twice the coefficients: they must err less than one by this share.
_MIN_GAIN = 0.1
# A law that is off by no more than repeats of a point differ, in log units, needs no other.
_NOISE_LOG = 0.02
# What a law is off by more than this, in log units, does not decide where to split.
_MAX_RESIDUAL_LOG = 1.5
# Where a split ends a branch.
_LEAF = -1


@dataclass(frozen=True, slots=True)
class Regimes:
    """A binary tree as a heap, the children of node i at 2i + 1 and 2i + 2; laws in its leaves.

    `feature` is the column a node splits, at `threshold` (lower or equal goes left), or -1 where
    the node has the law of that row of `coefficients` and `exponents`.
    """

    feature: IntColumn
    threshold: FloatColumn
    coefficients: Matrix
    exponents: FloatColumn

    def log_ratio(self, design: Design) -> FloatColumn:
        """Return log(law / base) of every call, by the law of its regime."""
        found = np.empty(design.num_rows)
        nodes = self._leaves(design.features)
        for node in np.unique(nodes).tolist():
            rows = np.flatnonzero(nodes == node)
            coefficients = self.coefficients[node]
            law = WorkLaw(coefficients, float(self.exponents[node]))
            found[rows] = law.log_ratio(design, rows)
        return found

    def refit(self, design: Design, log_ratio: FloatColumn) -> "Regimes":
        """Return the same regimes with laws fitted to other points of the series.

        One with too few of them for a law takes that of all.
        """
        if design.num_rows < MIN_LAW_ROWS:
            return fit_regimes(design, log_ratio)
        coefficients = np.zeros_like(self.coefficients)
        nodes = self._leaves(design.features)
        for node in np.flatnonzero(self.feature == _LEAF).tolist():
            rows = np.flatnonzero(nodes == node)
            if len(rows) < MIN_LAW_ROWS:
                rows = np.arange(design.num_rows)
            exponents = (float(self.exponents[node]),)
            law = fit_work_law(design.take(rows), log_ratio[rows], exponents)
            coefficients[node] = law.coefficients
        return replace(self, coefficients=coefficients)

    def to_arrays(self) -> Mapping[str, npt.NDArray[np.float64]]:
        """Return what the tree is made of, to be stored."""
        return {
            "law_nodes": np.column_stack([self.feature, self.threshold, self.exponents]),
            "law_coefficients": self.coefficients,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[np.float64]]) -> "Regimes":
        """Return the tree from what is stored."""
        feature, threshold, exponents = arrays["law_nodes"].T
        return cls(feature.astype(np.int64), threshold, arrays["law_coefficients"], exponents)

    def _leaves(self, features: Matrix) -> IntColumn:
        nodes = np.zeros(len(features), dtype=np.int64)
        rows = np.arange(len(features))
        for _ in range(_MAX_DEPTH):
            column = self.feature[nodes]
            goes_right = features[rows, column] > self.threshold[nodes]
            nodes = np.where(column == _LEAF, nodes, 2 * nodes + 1 + goes_right)
        return nodes


def fit_regimes(design: Design, log_ratio: FloatColumn) -> Regimes:
    """Fit one law, and split it where two are better."""
    num_nodes = 2 ** (_MAX_DEPTH + 1) - 1
    first = fit_work_law(design, log_ratio)
    regimes = Regimes(
        np.full(num_nodes, _LEAF),
        np.zeros(num_nodes),
        np.zeros((num_nodes, len(first.coefficients))),
        np.ones(num_nodes),
    )
    _grow(regimes, 0, first, design, log_ratio)
    return regimes


def _grow(
    regimes: Regimes, node: int, law: WorkLaw, design: Design, log_ratio: FloatColumn
) -> None:
    regimes.coefficients[node], regimes.exponents[node] = law.coefficients, law.exponent
    residual_log = log_ratio - law.log_ratio(design)
    if 2 * node + 2 >= len(regimes.feature) or np.abs(residual_log).mean() <= _NOISE_LOG:
        return
    feature, threshold = _find_split(design.features, residual_log)
    if feature == _LEAF:
        return
    is_right = design.features[:, feature] > threshold
    sides = [np.flatnonzero(~is_right), np.flatnonzero(is_right)]
    designs = [design.take(side) for side in sides]
    laws = [fit_work_law(d, log_ratio[side]) for d, side in zip(designs, sides, strict=True)]
    error = sum(
        np.abs(log_ratio[side] - own.log_ratio(d)).sum()
        for own, d, side in zip(laws, designs, sides, strict=True)
    )
    if error > (1.0 - _MIN_GAIN) * np.abs(residual_log).sum():
        return
    regimes.feature[node], regimes.threshold[node] = feature, threshold
    for child, (own, d, side) in enumerate(zip(laws, designs, sides, strict=True), 2 * node + 1):
        _grow(regimes, child, own, d, log_ratio[side])


def _find_split(features: Matrix, residual_log: FloatColumn) -> tuple[int, float]:
    """Return the column and threshold that explain most of the variance; -1 for none."""
    count = len(residual_log)
    left = np.arange(1, count)
    is_balanced = np.minimum(left, count - left) >= _MIN_ROWS
    if not is_balanced.any():
        return _LEAF, 0.0
    clipped = np.clip(residual_log, -_MAX_RESIDUAL_LOG, _MAX_RESIDUAL_LOG)
    clipped -= clipped.mean()
    best, found = 0.0, (_LEAF, 0.0)
    for place, column in enumerate(features.T):
        order = np.argsort(column, kind="stable")
        values = column[order]
        gain = np.cumsum(clipped[order])[:-1] ** 2 * (1.0 / left + 1.0 / (count - left))
        gain[~is_balanced | (values[1:] <= values[:-1])] = 0.0
        top = int(np.argmax(gain))
        # Columns that order points alike split alike: the first of them is taken.
        if gain[top] > best * (1.0 + 1e-9):
            best, found = gain[top], (place, float(values[top] + values[top + 1]) / 2.0)
    return found
