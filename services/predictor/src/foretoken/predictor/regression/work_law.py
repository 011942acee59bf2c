"""Latency as a law of the work done: a sum of what it may grow with, none of it negative.

Such a law follows the data through many configurations, goes on where they end, and never falls
when every part of the work grows. What it leaves over is small and smooth: the other models learn
that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.predictor.features import NUM_ROOFLINE_PARTS, Design, Matrix
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
        parts = (design.work[rows] * self.coefficients) ** self.exponent
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
    fits = [(*_fit(share**exponent, exponent), exponent) for exponent in exponents]
    _, solution, exponent = min(fits, key=lambda fit: fit[0])
    coefficients = np.zeros(design.work.shape[1])
    coefficients[parts] = solution ** (1.0 / exponent) / scale
    return WorkLaw(coefficients, exponent)


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
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    weights = np.ones(len(parts))
    for _ in range(_NUM_ROUNDS):
        solution, _ = nnls(parts * weights[:, None], weights, maxiter=50 * parts.shape[1])
        fitted = np.maximum(parts @ solution, _MIN_SHARE**exponent)
        error_log = np.abs(np.log(fitted)) / exponent
        weights = 1.0 / (fitted * np.sqrt(np.maximum(error_log, _MIN_ERROR_LOG)))
        weights /= weights.mean()
    return float(error_log.mean()), np.asarray(solution)
