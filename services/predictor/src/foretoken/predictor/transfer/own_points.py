"""What a device's own few points say of answers made from other measurements.

Other measurements, of the same chip in another product or of a starter catalog, tell how latency
changes with size. A few own points tell by how much those answers are off here, smoothly over the
operator's axes, and how far such a correction can be trusted.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.measurements.estimate import LatencyColumns, Provenance
from foretoken.predictor.features import Matrix
from foretoken.predictor.roofline import FloatColumn

# With fewer points the errors of those left out bound nothing.
MIN_POINTS = 9
# The share of truths that an interval shall hold.
_NOMINAL = 0.9
# No interval is taken for narrower than this, points measured twice differ by as much, nor for
# wider: a bound of zero says nothing.
_LEAST_LOG, _MOST_LOG = 0.01, 10.0
# Prior standard deviation of the level of a correction, in log units, and what its field may be
# like: octaves over which it bends, its standard deviation, that of a single point; the likeliest
# is taken. Source: GEMM, attention and experts of an H100 answered from an H200, corrected by 20 to
# 1,000 points of its own.
_LEVEL_LOG = 0.1
_OCTAVES, _FIELD_LOG = (1.0, 2.0, 4.0, 8.0, 16.0), (0.03, 0.06, 0.12, 0.25)
_POINT_LOG = (0.02, 0.04, 0.08, 0.16)
# Prior standard deviations of the weights of a reference's voices, beyond those it gives them: how
# much nearer to one of them the device may be.
_VOICE_WEIGHTS = (0.0, 0.3, 0.6)
# How many points the reference's own interval counts for where errors of points left out say how
# wide the corrected one is. Source: an H100's decode attention over FP8 keys, corrected by 20: 70 %
# of truths are inside without this, 97 % with it.
_PRIOR_POINTS = 2.0
# By how much a field must improve points left out to count in full, over the root of their number.
# Source: as for the shares of a model pooled over devices.
_SURE_GAIN = 2.0
# A point farther from the median of all than this many standard deviations, as the median distance
# tells them, draws the field no more than one that is as far: of a normal error 6 in 100,000 are.
_FAR, _SIGMA_OF_MEDIAN = 4.0, 1.4826
# How errors of a device's own model and of a corrected reference go together, which both rest on
# the same points. Source: attention of H100 and H200, GEMM of GB200 with 20, 100 and 1,000 own
# points, correlations of 0.05 to 0.75, the mean.
_TOGETHER = 0.34
# Points that say what the field is like, and that it is made of; more change little.
_MAX_JUDGED, _MAX_POINTS = 150, 1_000
# Calls answered at once: they need a number for each of them and each point.
_CHUNK = 4_096


@dataclass(frozen=True, slots=True)
class Places:
    """Calls where a correction is looked for: their axes in octaves, and what a reference mixes.

    `voices` has a column for each of the answers that the reference is the mean of, as their
    logarithms above its own; none for a reference of one voice.
    """

    axes: Matrix
    voices: Matrix

    @classmethod
    def of_axes(cls, axes: Matrix) -> "Places":
        """Return places where the reference has one voice."""
        return cls(axes, np.empty((len(axes), 0)))

    def take(self, rows: slice) -> "Places":
        """Return some of the places."""
        return Places(self.axes[rows], self.voices[rows])


@dataclass(frozen=True, slots=True)
class Reference:
    """What other measurements answer, and where that stands."""

    found: LatencyColumns
    places: Places


# Octaves over which a field bends, its standard deviation, and that of the weights of voices.
_Kind = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class _Field:
    """A Gaussian process over places, zero where nothing is known."""

    places: Places
    weights: FloatColumn
    kind: _Kind

    def predict(self, places: Places) -> FloatColumn:
        """Return the mean at places."""
        means = [
            _covariance(places.take(slice(first, first + _CHUNK)), self.places, self.kind)
            @ self.weights
            for first in range(0, len(places.axes), _CHUNK)
        ]
        return np.asarray(np.concatenate(means))


def _covariance(first: Places, second: Places, kind: _Kind) -> Matrix:
    """Return a common level's variance, a Matérn 3/2 field's and that of voices' weights."""
    octaves, field_log, weight = kind
    squared = _squared(first.axes) + _squared(second.axes).T - 2.0 * first.axes @ second.axes.T
    scaled = np.sqrt(3.0) * np.sqrt(np.maximum(squared, 0.0)) / octaves
    field = field_log**2 * (1.0 + scaled) * np.exp(-scaled)
    return np.asarray(_LEVEL_LOG**2 + field + weight**2 * first.voices @ second.voices.T)


def _squared(places: Matrix) -> Matrix:
    return np.asarray((places**2).sum(axis=1, keepdims=True))


def _fit_field(places: Places, values: FloatColumn) -> tuple[_Field, FloatColumn]:
    """Return the likeliest field through points, and how far each lies from what others tell."""
    judged = slice(None, None, math.ceil(len(values) / _MAX_JUDGED))
    weights = _VOICE_WEIGHTS if places.voices.shape[1] else _VOICE_WEIGHTS[:1]

    def inverse(rows: slice, kind: _Kind, point_log: float) -> Matrix:
        known = _covariance(places.take(rows), places.take(rows), kind)
        return np.asarray(np.linalg.inv(known + point_log**2 * np.eye(len(known))))

    def likelihood(choice: tuple[float, float, float, float]) -> float:
        *kind, point_log = choice
        found = inverse(judged, (kind[0], kind[1], kind[2]), point_log)
        fit = values[judged] @ found @ values[judged]
        return float(np.linalg.slogdet(found)[1] - fit)

    choices = itertools.product(_OCTAVES, _FIELD_LOG, weights, _POINT_LOG)
    octaves, field_log, weight, point_log = max(choices, key=likelihood)
    kind = octaves, field_log, weight
    found = inverse(slice(None), kind, point_log)
    drawn = found @ values
    return _Field(places, drawn, kind), drawn / np.diag(found)


@dataclass(frozen=True, slots=True)
class OwnCorrection:
    """By how much own points lie above a reference, in log units, as a field over the axes.

    Points left out are off by `error_ratio` on average, nine tenths of them by at most `width_log`;
    `reference_width_log` is the half-width of the reference's own interval at the points.
    """

    field: _Field
    error_ratio: float
    width_log: float
    reference_width_log: float
    num_points: int

    def apply(self, asked: Reference) -> LatencyColumns:
        """Return the reference's answers, corrected.

        Where the reference is less sure of a call than of the own points, so is the answer.
        """
        reference, above_log = asked.found, self.field.predict(asked.places)
        latency_us = reference.latency_us * np.exp(above_log)
        more_log = np.maximum(half_width_log(reference) ** 2 - self.reference_width_log**2, 0.0)
        width_log = np.sqrt(self.width_log**2 + more_log)
        return replace(
            reference,
            latency_us=latency_us,
            low_us=latency_us * np.exp(-width_log),
            high_us=latency_us * np.exp(width_log),
            basis=f"{reference.basis}, corrected by {self.num_points:,} own points",
        )


def learn_correction(answered: Reference, measured_us: FloatColumn) -> OwnCorrection:
    """Learn the correction from own points, measured and as the reference answers them.

    The width is the conformal quantile of the errors of points left out one at a time, with the
    reference's own as a prior.
    Source: Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World (2005), chapter 2.
    """
    reference = answered.found
    rows = slice(None, None, math.ceil(len(measured_us) / _MAX_POINTS))
    above_log = np.log(measured_us / reference.latency_us)[rows]
    drawing_log = _pull_in(above_log)
    field, left_out_log = _fit_field(answered.places.take(rows), drawing_log)
    left_out_log = left_out_log + (above_log - drawing_log)
    num_points = len(above_log)
    # What the field gains on points left out, over what it would by chance, is its weight.
    gain = 1.0 - np.abs(left_out_log).mean() / max(np.abs(above_log).mean(), _LEAST_LOG)
    share = float(np.clip(gain * math.sqrt(num_points) / _SURE_GAIN, 0.0, 1.0))
    field = replace(field, weights=share * field.weights)
    sorted_log = np.sort(np.abs(share * left_out_log + (1.0 - share) * above_log))
    place = min(math.ceil((num_points + 1) * _NOMINAL), num_points) - 1
    prior_log = float(np.median(half_width_log(reference)))
    squares = _PRIOR_POINTS * prior_log**2 + num_points * float(sorted_log[place]) ** 2
    width_log = math.sqrt(squares / (_PRIOR_POINTS + num_points))
    return OwnCorrection(
        field,
        float(sorted_log.mean()),
        max(width_log, _LEAST_LOG),
        prior_log,
        len(measured_us),
    )


def _pull_in(above_log: FloatColumn) -> FloatColumn:
    """Return values of which none is farther from the median than nearly all of normal ones are."""
    median = np.median(above_log)
    far = _FAR * _SIGMA_OF_MEDIAN * np.median(np.abs(above_log - median))
    return np.clip(above_log, median - far, median + far)


def half_width_log(estimates: LatencyColumns) -> FloatColumn:
    """Return half the width of every interval, in log units."""
    with np.errstate(divide="ignore"):
        width_log = 0.5 * np.log(estimates.high_us / estimates.low_us)
    return np.asarray(np.clip(width_log, _LEAST_LOG, _MOST_LOG))


def mix_answers(own: LatencyColumns, other: LatencyColumns, own_share: float) -> LatencyColumns:
    """Return two answers' weighted mean in log space, `own_share` that of the device's own model.

    What was measured at the very point stays as it is; where own points do not surround a call
    their share is no more than by the inverse squares of both widths. Intervals are averaged too,
    not narrowed: both answers rest on the same own points.
    """
    own_log, other_log = half_width_log(own), half_width_log(other)
    is_beyond = own.provenance > Provenance.INTERPOLATED.value
    by_width = other_log**2 / (own_log**2 + other_log**2)
    share = np.where(is_beyond, np.minimum(own_share, by_width), own_share)
    is_own = own.provenance == Provenance.MEASURED.value
    share[is_own] = 1.0
    latency_us = own.latency_us**share * other.latency_us ** (1.0 - share)
    width_log = share * own_log + (1.0 - share) * other_log
    return replace(
        own,
        latency_us=latency_us,
        low_us=np.where(is_own, own.low_us, latency_us * np.exp(-width_log)),
        high_us=np.where(is_own, own.high_us, latency_us * np.exp(width_log)),
        provenance=np.where(is_beyond, other.provenance, own.provenance),
        basis=f"{own.basis}; {other.basis}",
    )


def own_share(own_error_ratio: float, corrected_error_ratio: float) -> float:
    """Return the weight of a model among two that errs least, by errors on points left out.

    That of a model of which nothing could be left out is infinite. As both errors go together, a
    model that errs some three times as much as the other adds nothing to it.
    """
    if not math.isfinite(own_error_ratio):
        return 0.0
    ratio = own_error_ratio / max(corrected_error_ratio, _LEAST_LOG)
    share = (1.0 - _TOGETHER * ratio) / (1.0 + ratio**2 - 2.0 * _TOGETHER * ratio)
    return min(max(share, 0.0), 1.0)
