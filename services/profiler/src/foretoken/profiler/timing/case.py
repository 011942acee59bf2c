"""Time one call from its description: inputs, warm-up, samples, which kernel ran, and flags."""

import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from foretoken.domain.errors import DeviceMemoryError
from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.measurements.estimate import OperatorCall, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import least_element_bytes
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.environment import DeviceReading, free_memory_bytes, last_cache_bytes
from foretoken.profiler.kernel import (
    PreparedCase,
    TensorFactory,
    is_warm,
    kernel_of_call,
    prepare_case,
)
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.timing.kernel_names import NOT_TRACED, KernelNamer
from foretoken.profiler.timing.plausibility import implausible_flags, physical_limits
from foretoken.profiler.timing.stopwatch import (
    NUM_CALLS_BEFORE_CAPTURE,
    CapturedCalls,
    CaptureError,
    CpuStopwatch,
    CudaStopwatch,
    IndexedCall,
    Stopwatch,
    capture_calls,
)
from foretoken.profiler.timing.timer import TimingSummary, calls_per_sample, time_case
from foretoken.profiler.timing.watch import BlindWatch, DeviceWatch, Observation, open_watch

# A backward call holds its inputs, their gradients and what the forward pass saved.
_BACKWARD_MEMORY_RATIO = 3.0


def needed_bytes(call: OperatorCall) -> float:
    """Return about how many bytes the tensors of a call take."""
    spec = find_operator(call.operator)
    element_bytes = least_element_bytes(call.dtype, call.variant)
    needed = float(spec.moved_bytes(call.dims, element_bytes))
    needed += float(spec.num_weights(call.dims)) * element_bytes
    return needed * _BACKWARD_MEMORY_RATIO if call.phase is Phase.BACKWARD else needed


_log = logging.getLogger(__name__)

# EX_TEMPFAIL of sysexits.h: starting again goes on.
EXIT_STATUS = 75


def _leave() -> None:
    # Threads that hang in a kernel would keep an orderly exit from ending.
    os._exit(EXIT_STATUS)


class HungCaseWatch:
    """Waits next to the thread that times; at `limit_s` it says so and ends the process.

    `on_hung` is given the call and a reason first, from a thread of its own: there is time to note
    a failed row, by which the next start goes on behind it. With `limit_s` 0 nothing is watched.
    """

    def __init__(
        self,
        limit_s: float,
        on_hung: Callable[[OperatorCall, str], None],
        leave: Callable[[], None] = _leave,
    ) -> None:
        """Keep the limit and what to do."""
        self._limit_s = limit_s
        self._on_hung = on_hung
        self._leave = leave

    @contextmanager
    def watch(self, call: OperatorCall) -> Iterator[None]:
        """Watch while the block runs."""
        if self._limit_s <= 0:
            yield
            return
        timer = threading.Timer(self._limit_s, self._give_up, (call,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, call: OperatorCall) -> None:
        reason = f"HungCaseError: did not end in {self._limit_s:g} s"
        _log.error(
            "operator=%s dims=%s %s; the process ends, start the same profile again to go on",
            call.operator,
            dict(call.dims),
            reason,
        )
        try:
            self._on_hung(call, reason)
        finally:
            self._leave()


_FLUSH_CACHE_RATIO = 2.0

# How a call was timed: by the clock of the wall or of the timing thread, or on a GPU.
WALL, THREAD, GRAPH, EVENTS = "wall", "thread", "graph", "events"

# What calls have in common that differ in shape only: operator, kernel source, variant, ...
CaseKind = tuple[Hashable, ...]


@dataclass(slots=True)
class CaptureLog:
    """How many calls were timed as graphs, and which kinds of calls cannot be, with the reason."""

    num_graphs: int = 0
    num_events: int = 0
    refused: dict[CaseKind, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rig:
    """What calls are timed on, and with what; `open_rig` makes a full one.

    `warm_stopwatch` times calls whose inputs stay in the cache (None: `stopwatch` does). `stream`
    is the one that graphs are captured on. Without `namer` no kernel is named. A case may take
    `memory_ratio_max` of the free memory.
    """

    device: LocalDevice
    device_spec: DeviceSpec
    stopwatch: Stopwatch
    timer: TimerSpec
    num_threads: int
    warm_stopwatch: Stopwatch | None = None
    stream: "torch.cuda.Stream | None" = None
    watch: DeviceWatch = field(default_factory=BlindWatch)
    namer: KernelNamer | None = None
    captures: CaptureLog = field(default_factory=CaptureLog)
    memory_ratio_max: float = 0.5

    @property
    def cache_bytes(self) -> float:
        """Size of the device's last cache."""
        return last_cache_bytes(self.device, self.device_spec)

    @property
    def method(self) -> str:
        """How calls are timed here; on a GPU `events` where a graph cannot hold one."""
        if self.device.is_cuda:
            return GRAPH
        is_own = isinstance(self.stopwatch, CpuStopwatch) and self.stopwatch.is_thread_clock
        return THREAD if is_own else WALL

    def describe(self) -> dict[str, str]:
        """Return how calls are timed, as entries of a run's environment."""
        return {"timing": self.method}

    def summary(self) -> dict[str, str]:
        """Return how many calls were timed which way, as entries of a run's report."""
        refused = {"/".join(map(str, kind[:2])) for kind in self.captures.refused}
        facts = {
            "timed_as_graphs": self.captures.num_graphs,
            "timed_as_events": self.captures.num_events,
            "not_capturable": " ".join(sorted(refused)),
            "kernels_looked_up": self.namer.num_traced if self.namer else 0,
        }
        return {name: str(value) for name, value in facts.items() if value}


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTiming:
    """One timed call.

    `kernel` is the code that was called, `kernel_name` the device kernel that took longest (empty:
    not looked up) of `num_kernels`, `flags` are reasons to distrust the latency. `method` is how it
    was timed: `wall` or `thread`, `graph`, or `events` where a graph cannot hold the call.
    """

    summary: TimingSummary
    kernel: str
    kernel_name: str
    flags: list[str]
    reading: DeviceReading
    method: str = WALL
    num_kernels: int = 0


def open_rig(
    device: LocalDevice, timer: TimerSpec, num_threads: int, memory_ratio_max: float = 0.5
) -> Rig:
    """Return what times calls on a local device; call it in the thread that will time.

    Raises:
        RuntimeError: the device does not answer.

    """
    device_spec = find_device(device.name)
    watch, namer = open_watch(device, num_threads), KernelNamer(device.torch_device)
    namer.open()
    if not device.is_cuda:
        return Rig(
            device=device,
            device_spec=device_spec,
            # Several threads wait for each other, so only the wall clock counts them all.
            stopwatch=CpuStopwatch(work_ns=time.thread_time_ns if num_threads == 1 else None),
            timer=timer,
            num_threads=num_threads,
            watch=watch,
            namer=namer,
            memory_ratio_max=memory_ratio_max,
        )
    stream = torch.cuda.Stream(device.torch_device)
    flush_bytes = int(_FLUSH_CACHE_RATIO * last_cache_bytes(device, device_spec))
    stopwatch = CudaStopwatch(device.torch_device, flush_bytes)
    with torch.cuda.stream(stream):
        stopwatch.open()
    return Rig(
        device=device,
        device_spec=device_spec,
        stopwatch=stopwatch,
        timer=_cuda_timer(timer),
        num_threads=num_threads,
        warm_stopwatch=stopwatch.warm(),
        stream=stream,
        watch=watch,
        namer=namer,
        memory_ratio_max=memory_ratio_max,
    )


def time_call(call: OperatorCall, tensors: TensorFactory, rig: Rig) -> CallTiming:
    """Time a call with its kernel, on inputs that `tensors` makes.

    Inputs rotate so that the cache holds none of them; with `cache=warm` in the call's variant one
    set of inputs stays there.

    Raises:
        RuntimeError: the kernel refused, or the device failed.
        DeviceMemoryError: the call needs more memory than it may have.
        InvalidRequestError: no kernel runs this call here.

    """
    kernel = kernel_of_call(call, rig.device.torch_device)
    _check_memory(call, rig)
    # A backward pass runs on the stream of its forward pass, so inputs are made on it, too.
    with torch.cuda.stream(rig.stream), torch.no_grad():
        case = prepare_case(kernel, call, tensors, rig.timer, rig.cache_bytes)
        kind = (call.operator, case.source, call.variant, call.dtype, call.phase)
        summary, seen, method = time_prepared(case, kind, rig, is_warm=is_warm(call))
        trace = NOT_TRACED
        if rig.namer is not None:
            trace = rig.namer.trace(kind, tuple(call.dims.items()), lambda: case.call(0))
    limits = physical_limits(rig.device_spec, call.dtype, rig.num_threads)
    kept_bytes = math.inf if is_warm(call) else rig.cache_bytes
    return CallTiming(
        summary=summary,
        kernel=case.source,
        kernel_name=trace.name,
        flags=[
            *implausible_flags(call, summary.latency_us_median, limits, kept_bytes),
            *seen.flags,
        ],
        reading=seen.reading,
        method=method,
        num_kernels=trace.num_kernels,
    )


def time_prepared(
    case: PreparedCase, kind: CaseKind, rig: Rig, *, is_warm: bool = False
) -> tuple[TimingSummary, Observation, str]:
    """Time calls that are ready: their statistics, what was seen meanwhile, and the method.

    On a GPU `rig.stream` must be current, and the inputs made on it.

    Raises:
        RuntimeError: the calls failed, or the device.

    """
    stopwatch = rig.warm_stopwatch if is_warm and rig.warm_stopwatch else rig.stopwatch
    if not rig.device.is_cuda:
        return *_time_watched(case.call, stopwatch, rig.timer, rig), rig.method
    captured = _capture(case, kind, stopwatch, rig)
    if captured is None:
        return *_time_watched(case.call, stopwatch, rig.timer, rig), EVENTS
    try:
        spec = dataclasses.replace(rig.timer, max_calls_per_sample=1)
        summary, seen = _time_watched(lambda _: captured.replay(), stopwatch, spec, rig)
    finally:
        captured.close()
    return summary.divided_by(captured.num_calls), seen, GRAPH


def _time_watched(
    call: IndexedCall, stopwatch: Stopwatch, spec: TimerSpec, rig: Rig
) -> tuple[TimingSummary, Observation]:
    """Time a case; once more where the machine had other work, and the quieter time counts."""
    watch = rig.watch
    reads_clock = watch.clock_mhz if rig.device.is_cuda else None

    def attempt() -> tuple[TimingSummary, Observation]:
        summary = time_case(call, stopwatch, spec, read_clock=reads_clock, when_warm=watch.start)
        return summary, watch.finish()

    first = attempt()
    if not first[1].is_disturbed:
        return first
    return min(first, attempt(), key=lambda outcome: outcome[1].waited_ratio)


def _capture(
    case: PreparedCase, kind: CaseKind, stopwatch: Stopwatch, rig: Rig
) -> CapturedCalls | None:
    """Return the case as a graph, or None where it is timed by events around plain calls."""
    latency_us = min(
        stopwatch.time_calls_us(case.call, index, 1) for index in range(NUM_CALLS_BEFORE_CAPTURE)
    )
    if kind in rig.captures.refused:
        rig.captures.num_events += 1
        return None
    num_calls = calls_per_sample(latency_us, rig.timer)
    try:
        captured = capture_calls(case.call, num_calls, rig.device.torch_device)
    except CaptureError as err:
        rig.captures.refused[kind] = str(err)
    except torch.cuda.OutOfMemoryError:
        # Another shape may fit; this one runs without the graph's own memory.
        pass
    else:
        rig.captures.num_graphs += 1
        return captured
    rig.captures.num_events += 1
    return None


def _cuda_timer(timer: TimerSpec) -> TimerSpec:
    """Return the rules for a GPU: samples of a graph's calls, a warm-up of its own.

    Each call of a sample has inputs of its own, or inputs that exceed the cache: what was evicted
    before the sample stays cold.
    """
    return dataclasses.replace(
        timer,
        sample_us_min=timer.graph_us,
        max_calls_per_sample=timer.max_calls_per_graph,
        max_input_sets=timer.max_calls_per_graph,
        warm_up_s_min=timer.cuda_warm_up_s_min,
        warm_up_s_max=timer.cuda_warm_up_s_max,
    )


def _check_memory(call: OperatorCall, rig: Rig) -> None:
    needed = needed_bytes(call)
    allowed = rig.memory_ratio_max * free_memory_bytes(rig.device)
    if needed > allowed:
        raise DeviceMemoryError(f"needs about {needed:.3g} bytes, {allowed:.3g} may be used")
