"""What the predictor answered since it was opened: counts for operators and dashboards."""

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foretoken.domain.measurements.estimate import LatencyColumns, OperatorTable, Provenance

# Upper bounds of buckets. Intervals go from the noise of repeated measurements (a few percent) to
# the uncertainty about an operator that was never measured (a factor of several).
INTERVAL_RATIO_BOUNDS = (1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 5.0, 10.0)
# 0 is a measured point itself; an estimate is interpolated within one octave of a measured point.
NEAREST_OCTAVES_BOUNDS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# From a remembered call to a table of a million rows, in s.
SECONDS_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)

# What is counted at most, so that sums stay finite: an interval without a lower bound, and a
# distance where nothing was measured (no dimension of 63 bits spans more octaves).
MAX_INTERVAL_RATIO = 1000.0
MAX_OCTAVES = 64.0

_NUM_PROVENANCES = max(provenance.value for provenance in Provenance) + 1

_IntArray = npt.NDArray[np.int64]
_FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Counts by bucket, the last of them above the last bound; `total` is the sum of values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_values(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenanceStatistics:
    """Estimates of one operator that rest on the same kind of ground.

    `interval_ratio` is upper over lower bound, `nearest_octaves` the distance to the nearest
    measured point; the latter counts only answers that say it.
    """

    num_estimates: int
    interval_ratio: Histogram
    nearest_octaves: Histogram


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorStatistics:
    """What was answered of one operator; `seconds` counts tables, not rows."""

    provenances: Mapping[Provenance, ProvenanceStatistics]
    seconds: Histogram


@dataclass(frozen=True, kw_only=True, slots=True)
class StatisticsSnapshot:
    """The counts at one moment. `model_version` is empty while no model is active."""

    operators: Mapping[str, OperatorStatistics] = field(default_factory=dict)
    num_refusals: Mapping[str, int] = field(default_factory=dict)
    num_cache_hits: int = 0
    num_cache_misses: int = 0
    model_version: str = ""
    num_model_loads: int = 0
    num_failed_model_loads: int = 0


class _Scale:
    """Buckets of a quantity by provenance: a row of counts and their total for each provenance."""

    def __init__(self, bounds: tuple[float, ...], limit: float) -> None:
        self._bounds = bounds
        self._edges = np.array(bounds)
        self._limit = limit
        # The buckets, the one above them, and the total.
        self._width = len(bounds) + 2

    def nothing(self) -> _FloatArray:
        return np.zeros((_NUM_PROVENANCES, self._width))

    def count(self, provenance: _IntArray, values: _FloatArray) -> _FloatArray:
        # fmin takes the limit where there is no value.
        values = np.fmin(values, self._limit)
        cells = self._edges.searchsorted(values)
        cells += provenance * self._width
        num_cells = _NUM_PROVENANCES * self._width
        counts = np.bincount(cells, minlength=num_cells).astype(np.float64)
        counts = counts.reshape(_NUM_PROVENANCES, self._width)
        counts[:, -1] = np.bincount(provenance, weights=values, minlength=_NUM_PROVENANCES)
        return counts

    def read(self, counted: _FloatArray, provenance: Provenance) -> Histogram:
        *counts, total = counted[provenance.value].tolist()
        return Histogram(bounds=self._bounds, counts=tuple(map(int, counts)), total=total)


_INTERVAL_RATIO = _Scale(INTERVAL_RATIO_BOUNDS, MAX_INTERVAL_RATIO)
_NEAREST_OCTAVES = _Scale(NEAREST_OCTAVES_BOUNDS, MAX_OCTAVES)


class PredictionStatistics:
    """Adds up what several threads answer."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self._lock = threading.Lock()
        self._operators: dict[str, _OperatorCounts] = {}
        self._num_refusals: dict[str, int] = {}
        self._num_cache_hits = 0
        self._num_cache_misses = 0
        self._model_version = ""
        self._num_model_loads = 0
        self._num_failed_model_loads = 0

    def observe(self, table: OperatorTable, estimates: LatencyColumns, elapsed_s: float) -> None:
        """Count the answer to a table and the time it took."""
        provenance = np.asarray(estimates.provenance, dtype=np.int64)
        low_us = np.asarray(estimates.low_us, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.asarray(estimates.high_us, dtype=np.float64) / low_us
        octaves = np.asarray(estimates.nearest_octaves, dtype=np.float64)
        # Counted outside the lock: a bulk answer must not hold up single ones.
        widths = _INTERVAL_RATIO.count(provenance, ratio)
        distances = None
        if len(octaves) == len(provenance):
            distances = _NEAREST_OCTAVES.count(provenance, octaves)
        with self._lock:
            counts = self._operators.get(table.operator)
            if counts is None:
                counts = self._operators[table.operator] = _OperatorCounts()
            counts.interval_ratio += widths
            if distances is not None:
                counts.nearest_octaves += distances
            counts.seconds[bisect_left(SECONDS_BOUNDS, elapsed_s)] += 1
            counts.total_s += elapsed_s

    def observe_refusal(self, operator: str) -> None:
        """Count a table that was refused because it would need extrapolation."""
        with self._lock:
            self._num_refusals[operator] = self._num_refusals.get(operator, 0) + 1

    def observe_cache(self, *, is_hit: bool) -> None:
        """Count a table that was answered from memory, or one that had to be computed."""
        with self._lock:
            if is_hit:
                self._num_cache_hits += 1
            else:
                self._num_cache_misses += 1

    def observe_model(self, version: str) -> None:
        """Count a load of the model that answers from now on; an empty version is none."""
        with self._lock:
            self._model_version = version
            self._num_model_loads += 1

    def observe_failed_model_load(self) -> None:
        """Count a model that could not be loaded; the one before it goes on answering."""
        with self._lock:
            self._num_failed_model_loads += 1

    def read(self) -> StatisticsSnapshot:
        """Return the counts up to now."""
        with self._lock:
            return StatisticsSnapshot(
                operators={name: counts.read() for name, counts in self._operators.items()},
                num_refusals=dict(self._num_refusals),
                num_cache_hits=self._num_cache_hits,
                num_cache_misses=self._num_cache_misses,
                model_version=self._model_version,
                num_model_loads=self._num_model_loads,
                num_failed_model_loads=self._num_failed_model_loads,
            )


class _OperatorCounts:
    """What is counted for one operator, under the lock of its owner."""

    def __init__(self) -> None:
        self.interval_ratio = _INTERVAL_RATIO.nothing()
        self.nearest_octaves = _NEAREST_OCTAVES.nothing()
        self.seconds = [0] * (len(SECONDS_BOUNDS) + 1)
        self.total_s = 0.0

    def read(self) -> OperatorStatistics:
        provenances = {}
        for provenance in Provenance:
            interval_ratio = _INTERVAL_RATIO.read(self.interval_ratio, provenance)
            if interval_ratio.num_values:
                provenances[provenance] = ProvenanceStatistics(
                    num_estimates=interval_ratio.num_values,
                    interval_ratio=interval_ratio,
                    nearest_octaves=_NEAREST_OCTAVES.read(self.nearest_octaves, provenance),
                )
        seconds = Histogram(bounds=SECONDS_BOUNDS, counts=tuple(self.seconds), total=self.total_s)
        return OperatorStatistics(provenances=provenances, seconds=seconds)
