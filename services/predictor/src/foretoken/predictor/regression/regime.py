"""Laws of work by regime: where a series is run by several kernels, each has a law of its own.

A regime is a range of features. One law is split in two where what it leaves over differs most, as
long as the laws of both sides are clearly nearer to the points than the one of both.

A law is a sum of what latency may grow with, none of it negative: it follows the data through many
configurations, goes on where they end, and never falls when every part of the work grows. What it
leaves over is small and smooth: the other models learn that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretoken.predictor.features import NUM_ROOFLINE_PARTS, Design, Matrix
from foretoken.predictor.regression.light_imports import fit_not_negative
from foretoken.predictor.roofline import FloatColumn, IntColumn

# Parts add up (1) or the largest hides the others (4), as far as a device overlaps them; each
# series chooses by how well it fits.
_EXPONENTS = (1.0, 2.0, 4.0)
# Rounds of reweighting, from squared relative errors towards absolute errors of the logarithm, and
# the least error distinguished, in log units: repeats of one point differ by as much.
_NUM_ROUNDS, _MIN_ERROR_LOG = 3, 0.02
# Enough points to fit two dozen parts.
_MAX_ROWS = 1_500
# With fewer points a law would follow single measurements: the base latency serves.
MIN_LAW_ROWS = 12
# The law is never less than this share of the base latency.
_MIN_SHARE = 0.05
# Parts in one proportion at all points, to this, are one part to the fit.
_SAME_RATIO = 1e-9


@dataclass(frozen=True, slots=True)
class WorkLaw:
    """(sum of (coefficient * work)^exponent)^(1 / exponent), in µs; no coefficients: the base."""

    coefficients: FloatColumn
    exponent: float

    def log_ratio(self, design: Design, rows: IntColumn | slice = slice(None)) -> FloatColumn:
        """Return log(law / base) of every call, or those of some rows."""
        base_us = design.base_us[rows]
        if not len(self.coefficients):
            return np.zeros(len(base_us))
        parts = raise_to(design.work[rows] * self.coefficients, self.exponent)
        law_us = parts.sum(axis=1) ** (1.0 / self.exponent)
        return np.asarray(np.log(np.maximum(law_us / base_us, _MIN_SHARE)))


def fit_work_law(
    design: Design, log_ratio: FloatColumn, exponents: Sequence[float] = _EXPONENTS
) -> WorkLaw:
    """Return the law, of those with one of the exponents, that is the fewest per cent off."""
    if design.num_rows < MIN_LAW_ROWS:
        return WorkLaw(np.empty(0), 1.0)
    rows = np.arange(design.num_rows)
    if len(rows) > _MAX_ROWS:
        rows = np.random.default_rng(0).choice(rows, _MAX_ROWS, replace=False)
    latency_us = design.base_us[rows] * np.exp(log_ratio[rows])
    work = design.work[rows]
    parts = _tell_apart(work)
    work = work[:, parts]
    # Parts are scaled alike before they are raised to a power.
    scale = np.maximum(work.max(axis=0), np.finfo(float).tiny) / latency_us.max()
    share = work / scale / latency_us[:, None]
    fits = [(*_fit(raise_to(share, exponent), exponent), exponent) for exponent in exponents]
    _, solution, exponent = min(fits, key=lambda fit: fit[0])
    coefficients = np.zeros(design.work.shape[1])
    coefficients[parts] = solution ** (1.0 / exponent) / scale
    return WorkLaw(coefficients, exponent)


def raise_to(values: Matrix, exponent: float) -> Matrix:
    """Return a power of every value; the fourth in a tenth of the time of any."""
    return np.square(np.square(values)) if exponent == _EXPONENTS[-1] else values**exponent


def _tell_apart(work: Matrix) -> IntColumn:
    """Return the parts to fit: of those in one proportion at all points, one.

    Which of them takes the time, the points do not tell, and calls of another configuration are
    answered by what is chosen here. It is one of the roofline's, else the last: operators list the
    plainest cost first, the product of most dimensions last. Source: of AIConfigurator's tables of
    experts on H200, one layer's law asked for another layer errs by 13 to 25 %, 20 to 34 % if the
    fit may choose; the more so with many tokens.
    """
    first, count = NUM_ROOFLINE_PARTS, work.shape[1]
    # Points far apart in size count alike.
    relative = work / np.maximum(work[:, :1], np.finfo(float).tiny)
    lengths = np.linalg.norm(relative, axis=0)
    directions = relative / np.where(lengths > 0.0, lengths, 1.0)
    is_same = directions.T @ directions > 1.0 - _SAME_RATIO
    found: list[int] = []
    for place in (*range(first), *range(count - 1, first - 1, -1)):
        if lengths[place] and not is_same[place, found].any():
            found.append(place)
    return np.array(sorted(found), dtype=np.int64)


def _fit(parts: Matrix, exponent: float) -> tuple[float, FloatColumn]:
    """Return the mean error and the coefficients whose weighted parts add up nearest to 1."""
    weights = np.ones(len(parts))
    for _ in range(_NUM_ROUNDS):
        solution = fit_not_negative(parts * weights[:, None], weights, 50 * parts.shape[1])
        fitted = np.maximum(parts @ solution, _MIN_SHARE**exponent)
        error_log = np.abs(np.log(fitted)) / exponent
        weights = 1.0 / (fitted * np.sqrt(np.maximum(error_log, _MIN_ERROR_LOG)))
        weights /= weights.mean()
    return float(error_log.mean()), solution


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
