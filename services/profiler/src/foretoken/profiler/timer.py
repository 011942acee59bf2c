"""Time a prepared call: warm-up, adaptive sampling, robust statistics."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch

from foretoken.domain.units import NS_PER_US, US_PER_MS
from foretoken.profiler.config import TimerSpec

# Calls the case with one of its rotating input sets.
IndexedCall = Callable[[int], object]

_TAIL_PROBABILITY = 0.025
_WARM_UP_WINDOW = 6
# Fewer samples than this say nothing about a median, however slow the case is.
_FEWEST_SAMPLES = 3


class Stopwatch(Protocol):
    """Measures how long calls take on the device."""

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        """Return µs for `num_calls` calls together, with indices from `first` on."""

    def now_s(self) -> float:
        """Return a monotonic time in s, for caps."""


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


class CpuStopwatch:
    """Wall time of calls that return when their work is done."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        """Read time from `clock_ns`."""
        self._clock_ns = clock_ns

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        """Return µs of wall time for the calls together."""
        start_ns = self._clock_ns()
        for index in range(first, first + num_calls):
            call(index)
        return (self._clock_ns() - start_ns) / NS_PER_US

    def now_s(self) -> float:
        """Return the clock in s."""
        return self._clock_ns() * 1e-9


class CudaStopwatch:
    """Device time between two events around the calls.

    Before the first event a buffer larger than the L2 cache is written. That evicts the cache and
    keeps the device busy while the host queues the calls, so that launch overhead on the host
    does not enter the time of short kernels. As many writes are queued as the calls need.
    """

    _max_flushes = 400

    def __init__(self, device: torch.device, flush_bytes: int) -> None:
        """Write `flush_bytes` before each sample; call `open` before use."""
        self._device = device
        self._flush_bytes = flush_bytes
        self._buffer = torch.empty(0)
        self._flush_us = 0.0
        self._num_flushes = 1

    def open(self) -> None:
        """Allocate the buffer and learn how long writing it takes."""
        self._buffer = torch.empty(self._flush_bytes, dtype=torch.uint8, device=self._device)
        self._buffer.zero_()
        num_writes = 20
        start = self._record()
        for _ in range(num_writes):
            self._buffer.zero_()
        end = self._record()
        end.synchronize()
        self._flush_us = start.elapsed_time(end) * US_PER_MS / num_writes

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        """Return µs of device time for the calls together."""
        for _ in range(self._num_flushes):
            self._buffer.zero_()
        start = self._record()
        queued_ns = time.perf_counter_ns()
        for index in range(first, first + num_calls):
            call(index)
        queueing_us = (time.perf_counter_ns() - queued_ns) / NS_PER_US
        end = self._record()
        end.synchronize()
        needed = math.ceil(1.5 * queueing_us / max(self._flush_us, 1.0))
        self._num_flushes = min(max(needed, 1), self._max_flushes)
        return float(start.elapsed_time(end)) * US_PER_MS

    def now_s(self) -> float:
        """Return the host's monotonic clock."""
        return time.perf_counter()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def time_case(call: IndexedCall, stopwatch: Stopwatch, spec: TimerSpec) -> TimingSummary:
    """Warm a case up, then sample it until its median is known well enough or time is up."""
    stopwatch.time_calls_us(call, 0, 1)
    num_calls, num_done = _warm_up(call, stopwatch, spec)
    samples: list[float] = []
    start_s = stopwatch.now_s()
    while not _is_enough(samples, stopwatch.now_s() - start_s, spec):
        samples.append(stopwatch.time_calls_us(call, num_done, num_calls) / num_calls)
        num_done += num_calls
    return summarize(samples)


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


def _warm_up(call: IndexedCall, stopwatch: Stopwatch, spec: TimerSpec) -> tuple[int, int]:
    """Return calls per sample and calls made, once latency has settled or time is up."""
    start_s = stopwatch.now_s()
    latest: list[float] = []
    num_calls, num_done = 1, 1
    while True:
        latest.append(stopwatch.time_calls_us(call, num_done, num_calls) / num_calls)
        num_done += num_calls
        wanted = math.ceil(spec.sample_us_min / max(min(latest), 1e-3))
        num_calls = min(max(wanted, 1), spec.max_calls_per_sample)
        elapsed_s = stopwatch.now_s() - start_s
        if elapsed_s >= spec.warm_up_s_max:
            return num_calls, num_done
        if elapsed_s >= spec.warm_up_s_min and _has_settled(latest, spec.warm_up_ratio):
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
