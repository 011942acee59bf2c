"""Latency as a law of the work done: a sum of what it may grow with, none of it negative.

Such a law follows the data through many configurations, goes on where they end, and never falls
when every part of the work grows. What it leaves over is small and smooth: the other models learn
that.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.roofline import FloatColumn

# Parts add up (1) or the largest hides the others (4), as far as a device overlaps them; each
# series chooses by how well it fits.
_EXPONENTS = (1.0, 2.0, 4.0)
# Rounds of reweighting, from squared relative errors towards absolute errors of the logarithm, and
# the least error told apart, in log units: repeats of one point differ by as much.
_NUM_ROUNDS, _MIN_ERROR_LOG = 3, 0.02
# Enough points to fit two dozen parts.
_MAX_ROWS = 5_000
# With fewer points a law would follow single measurements: the base latency serves.
_MIN_ROWS = 12
# The law is never less than this share of the base latency.
_MIN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class WorkLaw:
    """(sum of (coefficient * work)^exponent)^(1 / exponent), in µs; no coefficients: the base."""

    coefficients: FloatColumn
    exponent: float

    def log_ratio(self, design: Design) -> FloatColumn:
        """Return log(law / base) of every call."""
        if not len(self.coefficients):
            return np.zeros(design.num_rows)
        parts = (design.work * self.coefficients) ** self.exponent
        law_us = parts.sum(axis=1) ** (1.0 / self.exponent)
        return np.asarray(np.log(np.maximum(law_us / design.base_us, _MIN_SHARE)))


def fit_work_law(design: Design, log_ratio: FloatColumn) -> WorkLaw:
    """Return the law that is the fewest per cent off."""
    if design.num_rows < _MIN_ROWS:
        return WorkLaw(np.empty(0), 1.0)
    rows = np.arange(design.num_rows)
    if len(rows) > _MAX_ROWS:
        rows = np.random.default_rng(0).choice(rows, _MAX_ROWS, replace=False)
    latency_us = design.base_us[rows] * np.exp(log_ratio[rows])
    # Parts are scaled alike before they are raised to a power.
    scale = np.maximum(design.work[rows].max(axis=0), np.finfo(float).tiny) / latency_us.max()
    share = design.work[rows] / scale / latency_us[:, None]
    fits = [(*_fit(share**exponent, exponent), exponent) for exponent in _EXPONENTS]
    _, solution, exponent = min(fits, key=lambda fit: fit[0])
    return WorkLaw(solution ** (1.0 / exponent) / scale, exponent)


def _fit(parts: Matrix, exponent: float) -> tuple[float, FloatColumn]:
    """Return the mean error and the coefficients whose weighted parts add up nearest to 1."""
    weights = np.ones(len(parts))
    for _ in range(_NUM_ROUNDS):
        solution, _ = nnls(parts * weights[:, None], weights, maxiter=50 * parts.shape[1])
        fitted = np.maximum(parts @ solution, _MIN_SHARE**exponent)
        error_log = np.abs(np.log(fitted)) / exponent
        weights = 1.0 / (fitted * np.sqrt(np.maximum(error_log, _MIN_ERROR_LOG)))
        weights /= weights.mean()
    return float(error_log.mean()), np.asarray(solution)
