"""Smooth what a law leaves over: curves over message size that neighbouring groups share."""

from dataclasses import dataclass

import numpy as np

from foretoken.predictor.features import Matrix
from foretoken.predictor.roofline import FloatColumn

# Prior standard deviation of the residual curve and of a single measurement around it, in log
# units, and the octaves of ranks or nodes over which two groups' curves come apart. Source: points
# and groups left out of NCCL tables of two devices; a factor of two either way changes little.
_CURVE_LOG = 0.5
_NOISE_LOG = 0.05
_GROUP_OCTAVES = 8.0
# Repeats of a size lower the noise of their median only so far: what they share stays.
_MIN_NOISE_SHARE = 0.2
# Octaves of size over which a curve bends; each series chooses by leaving out its own points.
_SIZE_OCTAVES = (4.0, 8.0)
# Groups inside a node and across nodes use other links: as far apart as 2^16 times the ranks.
_OTHER_LINK_OCTAVES = 16.0


@dataclass(frozen=True, slots=True)
class CurveProcess:
    """A Gaussian process over places; `places` are log2 of size, devices per node and nodes.

    `values_log` are residuals at the places, each the median of `counts` measurements.
    """

    places: Matrix
    values_log: FloatColumn
    counts: FloatColumn
    size_octaves: float

    def predict(self, places: Matrix) -> tuple[FloatColumn, FloatColumn]:
        """Return mean and standard deviation, that of one measurement, at places."""
        from scipy.linalg import cho_factor, cho_solve  # type: ignore[import-untyped]

        known = cho_factor(_covariance(self.places, self.counts, self.size_octaves), lower=True)
        shared = _kernel(places, self.places, self.size_octaves)
        mean = shared @ cho_solve(known, self.values_log)
        explained = (shared * cho_solve(known, shared.T).T).sum(axis=1)
        variance = np.maximum(_CURVE_LOG**2 - explained, 0.0) + _NOISE_LOG**2
        return np.asarray(mean), np.sqrt(variance)


def fit_curve_process(places: Matrix, values_log: FloatColumn, counts: FloatColumn) -> CurveProcess:
    """Choose how fast curves bend by the error at places left out one at a time."""
    errors = []
    for size_octaves in _SIZE_OCTAVES:
        inverse = np.linalg.inv(_covariance(places, counts, size_octaves))
        errors.append(np.abs(inverse @ values_log / np.diag(inverse)).mean())
    return CurveProcess(places, values_log, counts, _SIZE_OCTAVES[int(np.argmin(errors))])


def _covariance(places: Matrix, counts: FloatColumn, size_octaves: float) -> Matrix:
    noise = _NOISE_LOG**2 * np.maximum(1.0 / counts, _MIN_NOISE_SHARE)
    return _kernel(places, places, size_octaves) + np.diag(noise)


def _kernel(first: Matrix, second: Matrix, size_octaves: float) -> Matrix:
    """Return the covariance: Matérn 3/2 over size, exponential over the group."""
    scaled = np.sqrt(3.0) * np.abs(first[:, :1] - second[:, 0]) / size_octaves
    apart = np.abs(first[:, 1:, None] - second[:, 1:].T).sum(axis=1)
    is_other_link = (first[:, 2:] > 0.0) != (second[:, 2] > 0.0)
    apart = apart + _OTHER_LINK_OCTAVES * is_other_link
    return np.asarray(_CURVE_LOG**2 * (1.0 + scaled) * np.exp(-scaled - apart / _GROUP_OCTAVES))
