"""Take the time of calls: wall time on a CPU, events in the stream of a GPU."""

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch

from foretoken.domain.units import NS_PER_US, US_PER_MS

# Calls the case with one of its rotating input sets.
IndexedCall = Callable[[int], object]

_MAX_FLUSHES = 400
_NUM_TRIAL_FLUSHES = 20


class Stopwatch(Protocol):
    """Measures how long calls take on the device."""

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        """Return µs for `num_calls` calls together, with indices from `first` on."""

    def now_s(self) -> float:
        """Return a monotonic time in s, for caps."""


class CpuStopwatch:
    """Time of calls that return when their work is done.

    By the wall clock; or by `work_ns`, a clock that stands still while the calling thread has no
    core (`time.thread_time_ns`), where that thread does all the work: what other programs took of
    the core is then not in the time.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        work_ns: Callable[[], int] | None = None,
    ) -> None:
        """Read time from `clock_ns`, and that of calls from `work_ns` where it is given."""
        self._clock_ns = clock_ns
        self._work_ns = work_ns or clock_ns
        self.is_thread_clock = work_ns is not None

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        """Return µs for the calls together."""
        start_ns = self._work_ns()
        for index in range(first, first + num_calls):
            call(index)
        return (self._work_ns() - start_ns) / NS_PER_US

    def now_s(self) -> float:
        """Return the wall clock in s."""
        return self._clock_ns() * 1e-9


class CudaStopwatch:
    """Device time between two events around the calls.

    Before the first event a buffer larger than the L2 cache is read. That evicts the cache and
    keeps the device busy while the host queues the calls, so that launch overhead on the host
    does not enter the time of short kernels. It is read as often as the queueing takes. Read and
    not written: lines that must be written back would take bandwidth from the calls.

    With `is_warm` calls run once untimed before the first event, after the reads: what they use
    is then in the cache as far as it fits.
    """

    def __init__(self, device: torch.device, flush_bytes: int, *, is_warm: bool = False) -> None:
        """Read `flush_bytes` before each sample; call `open` before use."""
        self._device = device
        self._flush_bytes = flush_bytes
        self._is_warm = is_warm
        self._buffer = torch.empty(0)
        self._sink = torch.empty(0)
        self._flush_us = 0.0
        self._num_flushes = 1

    def open(self) -> None:
        """Allocate the buffer and learn how long reading it takes."""
        num_values = max(self._flush_bytes // 4, 1)
        self._buffer = torch.ones(num_values, dtype=torch.float32, device=self._device)
        self._sink = torch.empty((), dtype=torch.float32, device=self._device)
        self._flush()
        start = self._record()
        for _ in range(_NUM_TRIAL_FLUSHES):
            self._flush()
        end = self._record()
        end.synchronize()
        self._flush_us = start.elapsed_time(end) * US_PER_MS / _NUM_TRIAL_FLUSHES

    def warm(self) -> "CudaStopwatch":
        """Return one that shares this buffer and leaves in the cache what the calls use."""
        other = CudaStopwatch(self._device, self._flush_bytes, is_warm=True)
        other._buffer, other._sink = self._buffer, self._sink
        other._flush_us = self._flush_us
        return other

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        """Return µs of device time for the calls together."""
        for _ in range(self._num_flushes):
            self._flush()
        queued_ns = time.perf_counter_ns()
        if self._is_warm:
            _queue(call, first, num_calls)
        start = self._record()
        _queue(call, first, num_calls)
        queueing_us = (time.perf_counter_ns() - queued_ns) / NS_PER_US
        end = self._record()
        end.synchronize()
        needed = math.ceil(1.5 * queueing_us / max(self._flush_us, 1.0))
        self._num_flushes = min(max(needed, 1), _MAX_FLUSHES)
        return float(start.elapsed_time(end)) * US_PER_MS

    def now_s(self) -> float:
        """Return the host's monotonic clock."""
        return time.perf_counter()

    def _flush(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._sink)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _queue(call: IndexedCall, first: int, num_calls: int) -> None:
    for index in range(first, first + num_calls):
        call(index)
