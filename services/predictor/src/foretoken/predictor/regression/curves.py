"""Collectives: latency over message size, one curve per group of ranks.

A ring law says how latency grows with size and group, a Gaussian process what each group's curve
adds to it. Curves are tabulated when first asked for, and never fall as messages grow.
"""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.features import CONFIGURATION_DIMS, Design, Matrix
from foretoken.predictor.regression.prediction import Prediction, RegressorState
from foretoken.predictor.regression.ring_law import RingLaw, fit_ring_law
from foretoken.predictor.roofline import FloatColumn, IntColumn

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
        known = _covariance(self.places, self.counts, self.size_octaves)
        shared = _kernel(places, self.places, self.size_octaves)
        mean = shared @ np.linalg.solve(known, self.values_log)
        explained = (shared * np.linalg.solve(known, shared.T).T).sum(axis=1)
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


# Message sizes that curves are tabulated at: up to 2^44 bytes, and so close together that straight
# lines in log space between them are within 0.1 % of the curve.
_TABLE_OCTAVES, _STEPS_PER_OCTAVE = 44, 8
_TABLE_BYTES = 2.0 ** (np.arange(_TABLE_OCTAVES * _STEPS_PER_OCTAVE + 1) / _STEPS_PER_OCTAVE)
# A group with more sizes is summed up by medians over steps, an eighth of an octave or wider:
# thousands of noisy points say no more than their medians do, and cost a thousand times as much.
# Where there are many groups, so that the process has no more places than this in all.
_MAX_GROUP_SIZES, _MAX_PLACES = 48, 1_500


@dataclass(frozen=True, slots=True)
class _Curve:
    """Latency of one group at the sizes of the table, and how uncertain it is, in log units."""

    latency_log: FloatColumn
    spread_log: FloatColumn


@dataclass(frozen=True, slots=True)
class CurveRegressor:
    """A ring law and the curves around it; points are (bytes, devices per node, nodes)."""

    law: RingLaw
    process: CurveProcess
    _curves: dict[tuple[int, int], _Curve] = field(default_factory=dict, repr=False, compare=False)

    def predict(self, design: Design, tiers: IntColumn) -> Prediction:
        """Return the prediction of every call, for a group that was measured or not."""
        del tiers  # The process knows by itself how far a call is from its points.
        latency_log, spread_log = np.empty(design.num_rows), np.empty(design.num_rows)
        steps = np.log2(np.maximum(design.points[:, 0], 1)) * _STEPS_PER_OCTAVE
        table = np.arange(len(_TABLE_BYTES))
        for rows in _rows_by_group(design.points):
            curve = self._curve(design.take(rows[:1]))
            latency_log[rows] = np.interp(steps[rows], table, curve.latency_log)
            spread_log[rows] = np.interp(steps[rows], table, curve.spread_log)
        members = {"ring_law": self.law.log_ratio(design)}
        return Prediction(latency_log - np.log(design.base_us), spread_log, members)

    def to_state(self) -> RegressorState:
        """Return the law and the points of the process."""
        return RegressorState(
            arrays={
                "law_coefficients": self.law.coefficients,
                "places": self.process.places,
                "values_log": self.process.values_log,
                "counts": self.process.counts,
            },
            numbers={
                "law_other_log": self.law.other_log,
                "size_octaves": self.process.size_octaves,
            },
        )

    @classmethod
    def from_state(cls, state: RegressorState) -> "CurveRegressor":
        """Return the model that a state was taken from."""
        arrays, numbers = state.arrays, state.numbers
        return cls(
            RingLaw(arrays["law_coefficients"], numbers["law_other_log"]),
            CurveProcess(
                arrays["places"], arrays["values_log"], arrays["counts"], numbers["size_octaves"]
            ),
        )

    def _curve(self, call: Design) -> _Curve:
        """Return the curve of the group of one call."""
        group = int(call.points[0, 1]), int(call.points[0, 2])
        if group not in self._curves:
            self._curves[group] = self._tabulate(_all_sizes(call))
        return self._curves[group]

    def _tabulate(self, sizes: Design) -> _Curve:
        residual_log, spread_log = self.process.predict(_places(sizes.points))
        latency_log = np.log(sizes.base_us) + self.law.log_ratio(sizes) + residual_log
        measured = self.process.places[:, 0] * _STEPS_PER_OCTAVE
        low, high = int(measured.min()), int(np.ceil(measured.max())) + 1
        doubt_log = np.hypot(spread_log, self.law.doubt_log(sizes))
        return _Curve(_rise(latency_log, low, high), doubt_log)


def has_curves(spec: OperatorSpec) -> bool:
    """Tell whether an operator is one size over groups of ranks."""
    size, *group = spec.dim_names
    return (
        spec.is_collective
        and size not in CONFIGURATION_DIMS
        and tuple(group) == ("devices_per_node", "num_nodes")
    )


def fit_curve_regressor(design: Design, log_ratio: FloatColumn) -> CurveRegressor:
    """Fit the law to all groups, and the process to what it leaves over."""
    rows, values, counts = _sum_up(design, log_ratio)
    nodes = design.take(rows)
    law = fit_ring_law(nodes, values)
    residual_log = values - law.log_ratio(nodes)
    return CurveRegressor(law, fit_curve_process(_places(nodes.points), residual_log, counts))


def _sum_up(design: Design, log_ratio: FloatColumn) -> tuple[IntColumn, FloatColumn, FloatColumn]:
    """Return rows that stand for all, the value at each, and how many rows it stands for."""
    found: list[tuple[int, float, int]] = []
    groups = _rows_by_group(design.points)
    limit = max(1, min(_MAX_GROUP_SIZES, _MAX_PLACES // len(groups)))
    for rows in groups:
        sizes = np.log2(np.maximum(design.points[rows, 0], 1))
        codes = np.arange(len(rows))
        if len(rows) > limit:
            width = max(1.0 / _STEPS_PER_OCTAVE, np.ptp(sizes) / limit)
            codes = np.unique(np.floor(sizes / width), return_inverse=True)[1]
        for code in range(int(codes.max()) + 1):
            step = rows[codes == code]
            by_size = step[np.argsort(design.points[step, 0], kind="stable")]
            middle = int(by_size[len(by_size) // 2])
            found.append((middle, float(np.median(log_ratio[step])), len(step)))
    places, values, counts = zip(*found, strict=True)
    return np.array(places), np.array(values), np.array(counts, dtype=np.float64)


def _rows_by_group(points: IntColumn) -> list[IntColumn]:
    """Return the rows of each group of ranks that occurs."""
    if not len(points):
        return []
    # Fewer nodes than 2^32: both numbers fit one integer.
    codes = points[:, 1] << 32 | points[:, 2]
    _, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
    return np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])


def _all_sizes(call: Design) -> Design:
    """Return the calls of one call's group at the sizes of the table; links move bytes alike."""
    size_ratio = _TABLE_BYTES / call.points[0, 0]
    calls = call.take(np.zeros(len(_TABLE_BYTES), dtype=np.int64))
    roofline_us = calls.roofline_us * size_ratio
    points = calls.points.copy()
    points[:, 0] = _TABLE_BYTES
    return dataclasses.replace(
        calls,
        points=points,
        roofline_us=roofline_us,
        base_us=calls.base_us - calls.roofline_us + roofline_us,
    )


def _rise(latency_log: FloatColumn, low: int, high: int) -> FloatColumn:
    """Return the nearest curve that never falls; what lies outside the places does not move it."""
    below, inside, above = np.split(latency_log, [low, high])
    inside = pool_violators(inside)
    return np.concatenate(
        [
            np.minimum.accumulate(np.append(below, inside[0])[::-1])[:0:-1],
            inside,
            np.maximum.accumulate(np.append(inside[-1], above))[1:],
        ]
    )


def pool_violators(values: FloatColumn) -> FloatColumn:
    """Return the nearest values that never fall: neighbours that do have their mean.

    Source: Ayer et al. (1955), "An empirical distribution function for sampling with incomplete
    information". scipy has it too, and takes a tenth of a second to import.
    """
    means: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        mean, count = value, 1
        while means and means[-1] >= mean:
            before = counts.pop()
            mean = (means.pop() * before + mean * count) / (before + count)
            count += before
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)


def _places(points: IntColumn) -> Matrix:
    return np.log2(np.maximum(points, 1))
