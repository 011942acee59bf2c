"""Take the time of calls: wall time on a CPU, events of a GPU, replays of a CUDA graph."""

import contextlib
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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


# What a library needs to set up before it may be captured: handles, workspaces, compiled code.
NUM_CALLS_BEFORE_CAPTURE = 3
# Share of the device's memory that torch may hold, used or not, from one case to the next.
_RESERVED_RATIO_MAX = 0.25
# What torch's private functions raise that a release has not, or has no use for.
_NOT_NEEDED = (RuntimeError, AttributeError, TypeError)


class CaptureError(Exception):
    """The calls cannot be captured: they wait for the device, or work on the host."""


@dataclass(slots=True)
class CapturedCalls:
    """A graph of `num_calls` calls; `close` frees its private memory."""

    num_calls: int
    _graph: "torch.cuda.CUDAGraph"
    _device: torch.device

    def replay(self) -> None:
        """Queue all calls on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Let go of the graph's memory; it goes back to the device once much has gathered.

        Giving all unused memory back after each case would take longer than a short case.
        """
        self._graph.reset()
        total = torch.cuda.get_device_properties(self._device).total_memory
        if torch.cuda.memory_reserved(self._device) > _RESERVED_RATIO_MAX * total:
            torch.cuda.empty_cache()


def capture_calls(call: IndexedCall, num_calls: int, device: torch.device) -> CapturedCalls:
    """Capture `num_calls` calls on the current stream, which must not be the default one.

    They must have run on this stream before, and so must the forward pass of a backward call:
    autograd runs each step on the stream of its forward step.

    Raises:
        CaptureError: a call does what a graph cannot hold.
        RuntimeError: there is too little memory, or the device does not answer any more.

    """
    _refuse_waiting(call)
    torch.cuda.synchronize(device)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    # Other threads (a watch, a collective's) may go on calling CUDA meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for index in range(num_calls):
            call(index)
        is_empty = _end(graph)
    except torch.cuda.OutOfMemoryError:
        _abandon(graph, pool, device)
        raise
    except Exception as err:
        _abandon(graph, pool, device)
        raise CaptureError(_first_line(err)) from err
    except BaseException:
        _abandon(graph, pool, device)
        raise
    captured = CapturedCalls(num_calls, graph, device)
    if is_empty:
        captured.close()
        raise CaptureError("it launches nothing on the device")
    return captured


def _end(graph: "torch.cuda.CUDAGraph") -> bool:
    """End a capture, and return whether it holds nothing, about which torch only warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.capture_end()
    return any("empty" in str(warning.message) for warning in caught)


def _refuse_waiting(call: IndexedCall) -> None:
    """Run a call once that must not wait for the device.

    A capture that breaks leaves torch's allocator in an unknown state, so what is known to break
    one is found before.

    Raises:
        CaptureError: it waits.

    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # The mode is said not to find every wait: the capture itself finds the others.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call(0)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as err:
        raise CaptureError(_first_line(err)) from err
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _abandon(graph: "torch.cuda.CUDAGraph", pool: Any, device: torch.device) -> None:
    """End a capture that failed, and undo what it leaves behind.

    Raises:
        RuntimeError: the device does not answer any more.

    """
    index = torch.cuda.current_device() if device.index is None else device.index
    # Ending it is what makes the stream usable again; it reports the failure once more. Before
    # torch 2.12 the allocator then still believed in the capture, and no version frees its pool.
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        graph.reset()
    with contextlib.suppress(*_NOT_NEEDED):
        torch._C._cuda_endAllocateToPool(index, pool)  # noqa: SLF001
    with contextlib.suppress(*_NOT_NEEDED):
        torch._C._cuda_releasePool(index, pool)  # noqa: SLF001
    # The default generator may still believe that it is being captured, and refuse to draw.
    with contextlib.suppress(*_NOT_NEEDED):
        default = torch.cuda.default_generators[index]
        fresh = torch.Generator(device=device).manual_seed(default.initial_seed())
        default.graphsafe_set_state(fresh.graphsafe_get_state())
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _first_line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0]
