"""How uncertain points are, and how much one measurement tells about the others.

Errors are a Gaussian process along the axes of an operator, as kriging has them: Matérn 3/2, with a
length per axis. What is chosen depends on where points lie, not on what was measured there.
"""

import numpy as np

from foretoken.predictor.features import Matrix
from foretoken.predictor.regression.kriging import Scales
from foretoken.predictor.roofline import FloatColumn, IntColumn

# The mean of the absolute value of a normal error, in standard deviations.
_MEAN_OF_DEVIATION = float(np.sqrt(2.0 / np.pi))
_TINY = 1e-9
# Few large blocks multiply faster than many rows.
_MAX_BLOCKS = 32


class ErrorField:
    """The uncertainty of candidates and of the points that judge them, as measurements come in.

    Variances are in units of the field's sill.
    """

    def __init__(self, candidates: Matrix, judged: Matrix, known: Matrix, scales: Scales) -> None:
        """Take the rows of axes of all three; `known` are the points measured already."""
        lengths = np.exp(-scales.lengths_log)
        self._candidates = candidates * lengths
        judged = judged * lengths
        self._nugget = float(np.exp(scales.nugget_log))
        self._sill_log = scales.sill_log
        self._shared = _correlate(self._candidates, judged)
        self._variance = np.ones(len(candidates))
        self._judged_variance = np.ones(len(judged))
        # What measurements explain of each candidate, one row per measurement.
        self._explained: list[Matrix] = []
        if len(known):
            self._learn(known * lengths, judged)

    @property
    def error_ratio(self) -> float:
        """Mean relative error to expect over the judged points."""
        deviation = np.sqrt(np.maximum(self._judged_variance, 0.0) + self._nugget)
        return float(_MEAN_OF_DEVIATION * self._sill_log * deviation.mean())

    def gains(self) -> FloatColumn:
        """Return by how much every candidate, once measured, lowers the judged variance."""
        lowered = np.einsum("cj,cj->c", self._shared, self._shared)
        return np.asarray(lowered / self._pivots())

    def measure(self, candidate: int) -> None:
        """Count a candidate as measured."""
        root = np.sqrt(self._pivots()[candidate])
        covariance = _correlate(self._candidates, self._candidates[[candidate]])[:, 0]
        for rows in self._explained:
            covariance = covariance - rows.T @ rows[:, candidate]
        of_candidates = covariance / root
        of_judged = self._shared[candidate] / root
        self._shared -= np.outer(of_candidates, of_judged)
        self._variance -= of_candidates**2
        self._judged_variance -= of_judged**2
        self._keep(of_candidates)

    def _pivots(self) -> FloatColumn:
        return np.maximum(self._variance, 0.0) + self._nugget + _TINY

    def _learn(self, known: Matrix, judged: Matrix) -> None:
        from scipy.linalg import cholesky, solve_triangular  # type: ignore[import-untyped]

        noisy = _correlate(known, known) + (self._nugget + _TINY) * np.eye(len(known))
        factor = cholesky(noisy, lower=True)
        of_candidates = solve_triangular(factor, _correlate(known, self._candidates), lower=True)
        of_judged = solve_triangular(factor, _correlate(known, judged), lower=True)
        self._shared -= of_candidates.T @ of_judged
        self._variance -= (of_candidates**2).sum(axis=0)
        self._judged_variance -= (of_judged**2).sum(axis=0)
        self._explained.append(of_candidates)

    def _keep(self, of_candidates: FloatColumn) -> None:
        self._explained.append(of_candidates[None])
        if len(self._explained) > _MAX_BLOCKS:
            self._explained = [np.concatenate(self._explained)]


def _correlate(first: Matrix, second: Matrix) -> Matrix:
    from scipy.spatial.distance import cdist  # type: ignore[import-untyped]

    scaled = np.sqrt(3.0) * cdist(first, second)
    return np.asarray((1.0 + scaled) * np.exp(-scaled))


def thin_rows(num_rows: int, limit: int, seed: int) -> IntColumn:
    """Return at most so many rows, drawn at random, in their order."""
    if num_rows <= limit:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, limit, replace=False))
