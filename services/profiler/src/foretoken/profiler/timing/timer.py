"""Time a prepared call: warm-up, adaptive sampling, robust statistics."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from foretoken.profiler.config import TimerSpec
from foretoken.profiler.timing.stopwatch import IndexedCall, Stopwatch

_TAIL_PROBABILITY = 0.025
_WARM_UP_WINDOW = 6
# Fewer samples than this say nothing about a median, however slow the case is.
_FEWEST_SAMPLES = 3
# A clock has settled when so many readings in a row, this far apart, agree to within the ratio. A
# GPU steps its clock by 15 MHz, under 1 % of what it runs at.
_CLOCK_READINGS = 4
_CLOCK_PERIOD_S = 0.005
_CLOCK_RATIO = 0.012

# Reads a device's clock in MHz; None where it does not tell.
ReadsClock = Callable[[], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingSummary:
    """Statistics of one case, in µs of one call.

    `interval_ratio` is half the width of the median's 95 % interval over the median.
    """

    latency_us_median: float
    latency_us_mean: float
    latency_us_min: float
    latency_us_max: float
    latency_us_std: float
    latency_us_p10: float
    latency_us_p90: float
    num_samples: int
    interval_ratio: float

    def divided_by(self, divisor: float) -> "TimingSummary":
        """Return the statistics of one of `divisor` equal parts of each call."""
        times = {
            field.name: getattr(self, field.name) / divisor
            for field in dataclasses.fields(self)
            if field.name.startswith("latency_us")
        }
        return dataclasses.replace(self, **times)


def time_case(
    call: IndexedCall,
    stopwatch: Stopwatch,
    spec: TimerSpec,
    *,
    read_clock: ReadsClock | None = None,
    when_warm: Callable[[], None] = lambda: None,
) -> TimingSummary:
    """Warm a case up, then sample it until its median is known well enough or time is up.

    With `read_clock` warm-up also waits for a steady clock. `when_warm` runs before the first
    sample.
    """
    stopwatch.time_calls_us(call, 0, 1)
    num_calls, num_done = _warm_up(call, stopwatch, spec, read_clock)
    samples: list[float] = []
    when_warm()
    start_s = stopwatch.now_s()
    while not _is_enough(samples, stopwatch.now_s() - start_s, spec):
        samples.append(stopwatch.time_calls_us(call, num_done, num_calls) / num_calls)
        num_done += num_calls
    return summarize(samples)


def calls_per_sample(latency_us: float, spec: TimerSpec) -> int:
    """Return how many calls of that latency make a sample last long enough."""
    wanted = math.ceil(spec.sample_us_min / max(latency_us, 1e-3))
    return min(max(wanted, 1), spec.max_calls_per_sample)


def summarize(samples_us: Sequence[float]) -> TimingSummary:
    """Return the statistics of samples of one call."""
    samples = np.asarray(samples_us, dtype=np.float64)
    p10, median, p90 = np.percentile(samples, [10, 50, 90])
    return TimingSummary(
        latency_us_median=float(median),
        latency_us_mean=float(samples.mean()),
        latency_us_min=float(samples.min()),
        latency_us_max=float(samples.max()),
        latency_us_std=float(samples.std()),
        latency_us_p10=float(p10),
        latency_us_p90=float(p90),
        num_samples=len(samples),
        interval_ratio=median_interval_ratio(samples_us),
    )


def median_interval_ratio(samples: Sequence[float]) -> float:
    """Return half the width of the median's 95 % confidence interval over the median.

    The interval lies between two order statistics, so no distribution is assumed. Infinite where
    the samples are too few for one (below 6), or their median is not positive.

    Source: Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2.
    """
    rank = _lower_rank(len(samples))
    ordered = sorted(samples)
    median = float(np.median(ordered)) if ordered else 0.0
    if rank == 0 or median <= 0.0:
        return math.inf
    return (ordered[-rank] - ordered[rank - 1]) / (2.0 * median)


@cache
def _lower_rank(num_samples: int) -> int:
    """Return the 1-based rank of the interval's lower end, 0 where there is none."""
    cumulative = 0.0
    for successes in range(num_samples // 2 + 1):
        cumulative += math.comb(num_samples, successes) * 0.5**num_samples
        if cumulative > _TAIL_PROBABILITY:
            return successes
    return 0


@dataclass(slots=True)
class _Clock:
    """Readings of a device's clock while it warms up."""

    read: ReadsClock | None
    _readings: list[float] = field(default_factory=list)
    _read_s: float = -math.inf

    def has_settled(self, now_s: float) -> bool:
        """Return whether the latest readings agree; a device that tells none counts as steady."""
        if self.read is None:
            return True
        if now_s - self._read_s >= _CLOCK_PERIOD_S:
            self._read_s = now_s
            clock_mhz = self.read()
            if clock_mhz is None:
                self.read = None
                return True
            self._readings.append(clock_mhz)
        latest = self._readings[-_CLOCK_READINGS:]
        is_enough = len(latest) == _CLOCK_READINGS
        return is_enough and max(latest) - min(latest) <= _CLOCK_RATIO * max(latest)


def _warm_up(
    call: IndexedCall, stopwatch: Stopwatch, spec: TimerSpec, read_clock: ReadsClock | None
) -> tuple[int, int]:
    """Return calls per sample and calls made, once all has settled or time is up."""
    start_s = stopwatch.now_s()
    clock = _Clock(read_clock)
    latest: list[float] = []
    num_calls, num_done = 1, 1
    while True:
        latest.append(stopwatch.time_calls_us(call, num_done, num_calls) / num_calls)
        num_done += num_calls
        num_calls = calls_per_sample(min(latest), spec)
        now_s = stopwatch.now_s()
        elapsed_s = now_s - start_s
        if elapsed_s >= spec.warm_up_s_max:
            return num_calls, num_done
        is_steady = clock.has_settled(now_s) and _has_settled(latest, spec.warm_up_ratio)
        if elapsed_s >= spec.warm_up_s_min and is_steady:
            return num_calls, num_done


def _has_settled(latencies: Sequence[float], ratio: float) -> bool:
    if len(latencies) < _WARM_UP_WINDOW:
        return False
    half = _WARM_UP_WINDOW // 2
    older = float(np.median(latencies[-_WARM_UP_WINDOW:-half]))
    newer = float(np.median(latencies[-half:]))
    return abs(newer - older) <= ratio * newer


def _is_enough(samples: Sequence[float], elapsed_s: float, spec: TimerSpec) -> bool:
    num_samples = len(samples)
    if num_samples < _FEWEST_SAMPLES:
        return False
    if elapsed_s >= spec.case_s_max or num_samples >= spec.max_samples:
        return True
    if num_samples < spec.min_samples:
        return False
    # Sorting on every sample would cost more than short cases themselves.
    is_checked = num_samples % max(num_samples // 16, 1) == 0
    return is_checked and median_interval_ratio(samples) <= spec.interval_ratio_target
