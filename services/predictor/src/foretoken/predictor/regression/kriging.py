"""Local kriging: a call's value from the measured points nearest to it along the axes.

Each axis has a length over which values stay alike, learned by leaving points out one at a time.
"""

from dataclasses import dataclass, field

import numpy as np

from foretoken.predictor.features import Matrix
from foretoken.predictor.neighbours import NearestPoints
from foretoken.predictor.regression.light_imports import nearest_tree
from foretoken.predictor.roofline import FloatColumn, IntColumn

# Up to so many calls numpy solves: a process that requests little compiles nothing.
_MAX_FEW_CALLS = 16


def krige(
    places: Matrix, values: FloatColumn, calls: Matrix, neighbours: IntColumn, nugget: float
) -> tuple[FloatColumn, FloatColumn]:
    """Return the best linear estimate of every call, and its variance in units of the sill.

    `neighbours` are rows of `places`, one row per call; `nugget` is positive. Ordinary kriging: the
    mean is unknown.
    Source: Cressie, Statistics for Spatial Data (1993), section 3.2.
    """
    if len(calls) <= _MAX_FEW_CALLS:
        return krige_few(places, values, calls, neighbours, nugget)
    # Compiling takes seconds, and importing the compiler a part of one.
    from foretoken.predictor.regression.kriging_loop import krige_many

    return krige_many(places, values, calls, neighbours, nugget)


def krige_few(
    places: Matrix, values: FloatColumn, calls: Matrix, neighbours: IntColumn, nugget: float
) -> tuple[FloatColumn, FloatColumn]:
    """Return what `krige` does."""
    near = places[neighbours]
    to_call = _matern(near - calls[:, None])
    among = _matern(near[:, :, None] - near[:, None]) + nugget * np.eye(neighbours.shape[1])
    sides = np.stack([to_call, np.ones_like(to_call), values[neighbours]], axis=2)
    products = sides.transpose(0, 2, 1) @ np.linalg.solve(among, sides)
    (cc, co, cv), (_, oo, ov) = products[:, 0].T, products[:, 1].T
    level = ov / oo
    return level + cv - level * co, 1.0 + nugget - cc + (1.0 - co) ** 2 / oo


def _matern(apart: Matrix) -> Matrix:
    """Return the Matérn 3/2 correlation of places that lie apart by vectors (…, axes)."""
    distance = np.sqrt(3.0 * (apart**2).sum(axis=-1))
    return np.asarray((1.0 + distance) * np.exp(-distance))


# Source: over 24 kinds of splits of tables 12 err as much as 20 (ratio of the medians 1.000), in
# half the time.
_NUM_NEIGHBOURS = 12
# Points whose errors when left out decide the lengths; more of them change little.
_MAX_JUDGED, _JUDGED_SHARE = 200, 0.25
_MIN_JUDGED = 60
# The search: halving steps in log space up and down every length and the nugget, `_NUM_ROUNDS`
# times for each of two look-ups of neighbours. Lengths start at one octave, the nugget (variance of
# noise over that of the field) at 2 %, and stay in ranges far wider than any series needs.
_NUM_LOOKUPS, _NUM_ROUNDS = 2, 4
_START_LENGTH_LOG, _START_NUGGET_LOG = 0.0, -4.0
_LENGTH_RANGE_LOG, _NUGGET_RANGE_LOG = (-4.0, 5.0), (-12.0, 1.0)
# The pull of every length towards a few octaves, in the units of the criterion.
_PULL, _PULLED_TO_LOG = 5e-4, 1.0
# A mean absolute error is this share of the standard deviation, if errors are normal.
_MEAN_TO_DEVIATION = float(np.sqrt(np.pi / 2.0))
_MIN_SPREAD_LOG = 1e-3


@dataclass(frozen=True, slots=True)
class Scales:
    """Logs of the length of every axis, in octaves, and of the nugget; `sill_log` in log units."""

    lengths_log: FloatColumn
    nugget_log: float
    sill_log: float


@dataclass(frozen=True, slots=True)
class Kriging:
    """Points along the axes, the value at each, and the scales."""

    axes: Matrix
    values: FloatColumn
    scales: Scales
    _places: Matrix = field(init=False, repr=False, compare=False)
    _nearest: NearestPoints = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Place the points along the scaled axes."""
        places = _scale(self.axes, self.scales.lengths_log)
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_nearest", NearestPoints(places))

    def predict(self, axes: Matrix) -> tuple[FloatColumn, FloatColumn]:
        """Return the value of every call and its standard deviation.

        A measured point is estimated from those around it: its own measurement counts elsewhere.
        """
        calls = _scale(axes, self.scales.lengths_log)
        rows = self._find_others(calls)
        nugget = float(np.exp(self.scales.nugget_log))
        mean, variance = krige(self._places, self.values, calls, rows, nugget)
        return mean, np.maximum(self.scales.sill_log * np.sqrt(variance), _MIN_SPREAD_LOG)

    def _find_others(self, calls: Matrix) -> IntColumn:
        """Return the nearest points of every call, the call's own place left out."""
        count = min(_NUM_NEIGHBOURS, max(len(self.values) - 1, 1))
        wanted = min(count + 1, len(self.values))
        rows = self._nearest.find(calls, wanted)
        is_own = (self._places[rows[:, 0]] == calls).all(axis=1)
        others = np.ascontiguousarray(rows[:, :count])
        others[is_own] = rows[is_own, -count:]
        return others


def learn_scales(axes: Matrix, values: FloatColumn, seed: int) -> Scales:
    """Return the scales that tell points left out best from those around them."""
    num_axes = axes.shape[1]
    start = np.full(num_axes + 1, _START_LENGTH_LOG)
    start[-1] = _START_NUGGET_LOG
    if len(values) <= 2 or not num_axes:  # noqa: PLR2004
        spread = float(np.std(values)) if len(values) else 0.0
        return Scales(start[:-1], _START_NUGGET_LOG, max(spread, _MIN_SPREAD_LOG))
    search = _Search(axes, values, _choose_judged(len(values), seed))
    scales, steps = start, np.ones(len(start))
    for _ in range(_NUM_LOOKUPS):
        scales = search.improve(scales, steps)
    return Scales(scales[:-1], float(scales[-1]), search.sill(scales))


def _choose_judged(num_rows: int, seed: int) -> IntColumn:
    wanted = int(np.clip(_JUDGED_SHARE * num_rows, _MIN_JUDGED, _MAX_JUDGED))
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(num_rows, min(wanted, num_rows), replace=False))


@dataclass(frozen=True, slots=True)
class _Near:
    """The judged points and their neighbours, as rows of the few points that are either."""

    axes: Matrix
    values: FloatColumn
    judged: IntColumn
    rows: IntColumn


class _Search:
    """A search for scales by coordinate descent."""

    def __init__(self, axes: Matrix, values: FloatColumn, judged: IntColumn) -> None:
        self._axes = axes
        self._values = np.ascontiguousarray(values)
        self._judged = judged
        # An axis on which nothing differs has no length to learn.
        self._free = [*np.flatnonzero(np.ptp(axes, axis=0) > 0.0).tolist(), axes.shape[1]]

    def improve(self, scales: FloatColumn, steps: FloatColumn) -> FloatColumn:
        """Return better scales, with the neighbours of the judged points as they are now.

        `steps` get shorter where neither direction is better.
        """
        near = self._look_up(scales)
        best = self._criterion(scales, near)
        for _ in range(_NUM_ROUNDS):
            for place in self._free:
                for direction in (1.0, -1.0):
                    trial = scales.copy()
                    trial[place] += direction * steps[place]
                    if not _is_allowed(trial, place):
                        continue
                    found = self._criterion(trial, near)
                    if found < best:
                        scales, best = trial, found
                        break
                else:
                    steps[place] *= 0.5
        return scales

    def sill(self, scales: FloatColumn) -> float:
        """Return the standard deviation of the field, in log units."""
        errors, deviations = self._errors(scales, self._look_up(scales))
        sill = float((np.abs(errors) / deviations).mean() * _MEAN_TO_DEVIATION)
        return max(sill, _MIN_SPREAD_LOG)

    def _criterion(self, scales: FloatColumn, near: "_Near") -> float:
        """Return the log of a Laplace likelihood's scale: robust against outliers."""
        errors, deviations = self._errors(scales, near)
        pull = _PULL * ((scales[:-1] - _PULLED_TO_LOG) ** 2).sum()
        ratio = (np.abs(errors) / deviations).mean()
        return float(np.log(ratio + _MIN_SPREAD_LOG**2) + np.log(deviations).mean() + pull)

    def _errors(self, scales: FloatColumn, near: "_Near") -> tuple[FloatColumn, ...]:
        places = _scale(near.axes, scales[:-1])
        nugget = float(np.exp(scales[-1]))
        mean, variance = krige(places, near.values, places[near.judged], near.rows, nugget)
        return near.values[near.judged] - mean, np.sqrt(variance)

    def _look_up(self, scales: FloatColumn) -> "_Near":
        """Return the neighbours of every judged point, itself left out."""
        places = _scale(self._axes, scales[:-1])
        count = min(_NUM_NEIGHBOURS + 1, len(places))
        _, rows = nearest_tree(places).query(places[self._judged], k=count)
        is_self = rows == self._judged[:, None]
        # Among many coinciding points a point may not be among its own neighbours.
        is_self[~is_self.any(axis=1), -1] = True
        others = rows[~is_self].reshape(len(rows), count - 1)
        kept, place = np.unique(np.column_stack([self._judged, others]), return_inverse=True)
        judged, *neighbours = place.reshape(len(rows), count).T
        return _Near(
            self._axes[kept],
            self._values[kept],
            judged,
            np.ascontiguousarray(np.column_stack(neighbours), dtype=np.int64),
        )


def _is_allowed(scales: FloatColumn, place: int) -> bool:
    is_nugget = place == len(scales) - 1
    low, high = _NUGGET_RANGE_LOG if is_nugget else _LENGTH_RANGE_LOG
    return bool(low <= scales[place] <= high)


def _scale(axes: Matrix, lengths_log: FloatColumn) -> Matrix:
    return np.ascontiguousarray(axes * np.exp(-lengths_log))
