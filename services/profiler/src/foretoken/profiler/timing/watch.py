"""Watch a device while a case is timed: its clock, power and heat, and what disturbs it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from foretoken.profiler.environment import DeviceReading, cpu_clock_mhz
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.timing.nvml import (
    SLOWDOWNS,
    NvmlDevice,
    descendants,
    open_nvml,
    other_process_count,
)

# Listing the processes of a GPU takes longer than a short case; they do not come and go by the ms.
_PROCESS_PERIOD_S = 1.0

# Share of the time that the timing thread may be without a core before a timing is flagged: by
# the wall clock medians are then wrong by half, by the thread's own clock still right within 4 %.
# docs/explanation/timing.md shows the measurement.
WALL_WAITED_RATIO_MAX, THREAD_WAITED_RATIO_MAX = 0.25, 0.7
# Kernels account a core's time in ticks of 10 ms, so shorter looks say nothing.
_SHORTEST_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What was seen while a case was timed: the device's state, and flags on the timing.

    `waited_ratio` is the share of the time in which the timing thread had no core; with
    `is_disturbed` timing the case again may meet a quieter machine.
    """

    reading: DeviceReading = field(default_factory=DeviceReading)
    flags: tuple[str, ...] = ()
    waited_ratio: float = 0.0
    is_disturbed: bool = False


class DeviceWatch(Protocol):
    """Looks at a device around the sampling of one case."""

    def start(self) -> None:
        """Begin to look, right before the first sample."""

    def finish(self) -> Observation:
        """Return what was seen since `start`, right after the last sample."""

    def clock_mhz(self) -> float | None:
        """Return the present clock; None where the device does not tell or it has no meaning."""


class BlindWatch:
    """Sees nothing."""

    def start(self) -> None:
        """Do nothing."""

    def finish(self) -> Observation:
        """Return an empty observation."""
        return Observation()

    def clock_mhz(self) -> float | None:
        """Return None."""
        return None


class CpuWatch:
    """Sees how long the timing thread waited for a core while it had work.

    It computes all the time, so wall time less its own CPU time is time in which another process,
    or another guest of the host, had its core.
    """

    def __init__(
        self,
        waited_ratio_max: float,
        wall_s: Callable[[], float] = time.perf_counter,
        thread_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """Compare two clocks, of the wall and of this thread's CPU time; flag more waiting."""
        self._waited_ratio_max = waited_ratio_max
        self._wall_s = wall_s
        self._thread_s = thread_s
        self._started = (0.0, 0.0)

    def start(self) -> None:
        """Read both clocks."""
        self._started = self._wall_s(), self._thread_s()

    def finish(self) -> Observation:
        """Return the CPU's clock, and a flag when the thread waited too long."""
        elapsed_s = self._wall_s() - self._started[0]
        waited_s = elapsed_s - (self._thread_s() - self._started[1])
        is_long = elapsed_s >= _SHORTEST_LOOK_S
        waited_ratio = max(waited_s / elapsed_s, 0.0) if is_long else 0.0
        flags: tuple[str, ...] = ()
        is_disturbed = waited_ratio > self._waited_ratio_max
        if is_disturbed:
            flags = (f"busy_machine: other work had the core for {waited_ratio:.0%} of the time",)
        reading = DeviceReading(clock_mhz=cpu_clock_mhz())
        return Observation(
            reading=reading, flags=flags, waited_ratio=waited_ratio, is_disturbed=is_disturbed
        )

    def clock_mhz(self) -> float | None:
        """Return None: a CPU's cores settle within the warm-up's own rule."""
        return None


class CudaWatch:
    """Sees what NVML tells of a GPU."""

    def __init__(self, nvml: NvmlDevice, now_s: Callable[[], float] = time.monotonic) -> None:
        """Ask `nvml`; `now_s` says when to list the processes again."""
        self._nvml = nvml
        self._now_s = now_s
        self._throttle: set[str] = set()
        self._num_others = 0
        self._listed_s = float("-inf")

    def start(self) -> None:
        """Note what holds the clock down before the first sample."""
        self._throttle = set(self._nvml.throttle_reasons() or ())

    def finish(self) -> Observation:
        """Return the device's state, with flags for slowdowns and for other processes."""
        after = self._nvml.throttle_reasons()
        self._throttle.update(after or ())
        reading = DeviceReading(
            power_w=self._nvml.power_w(),
            clock_mhz=self._nvml.sm_clock_mhz(),
            temperature_c=self._nvml.temperature_c(),
            throttle=None if after is None else ",".join(sorted(self._throttle)),
        )
        flags = []
        if slowdowns := sorted(self._throttle & SLOWDOWNS):
            flags.append(f"throttled: {','.join(slowdowns)}")
        if num_others := self._count_others():
            flags.append(f"shared_device: {num_others} other processes compute on it")
        return Observation(reading=reading, flags=tuple(flags))

    def clock_mhz(self) -> float | None:
        """Return the present clock of the multiprocessors."""
        return self._nvml.sm_clock_mhz()

    def _count_others(self) -> int:
        now_s = self._now_s()
        if now_s - self._listed_s >= _PROCESS_PERIOD_S:
            self._listed_s = now_s
            listed = self._nvml.process_ids() or ()
            self._num_others = other_process_count(listed, os.getpid(), descendants(os.getpid()))
        return self._num_others


def open_watch(device: LocalDevice, num_threads: int) -> DeviceWatch:
    """Return what can be seen of a device here; a CPU's work runs on so many threads."""
    if not device.is_cuda:
        return CpuWatch(THREAD_WAITED_RATIO_MAX if num_threads == 1 else WALL_WAITED_RATIO_MAX)
    nvml = open_nvml(device.torch_device)
    return CudaWatch(nvml) if nvml else BlindWatch()
