"""Take the time of calls that all ranks of a group make together, alone or with other calls.

The slowest rank counts.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from foretoken.domain.units import NS_PER_US, US_PER_MS
from foretoken.profiler.ranks.group_spec import CollectiveTimingError
from foretoken.profiler.ranks.rendezvous_store import RankGroup
from foretoken.profiler.timing.stopwatch import CpuStopwatch, IndexedCall, Stopwatch

# The device spins for so many cycles a µs at most, so that the host is ahead in any case.
_CYCLES_PER_US = 2000
_HEAD_START_RATIO = 1.5
_HEAD_START_US_MIN = 50.0
_HEAD_START_US_MAX = 20_000.0

# (largest of all ranks) for each value.
Agree = Callable[..., list[float]]

# The concurrent calls should last longer than the timed ones, whatever each slows the other down
# by.
_FIRST_LENGTH_RATIO = 2.0
_GROWTH_RATIO = 2.0
_NUM_ATTEMPTS = 6


class GroupStopwatch:
    """Starts calls on all ranks together; the slowest rank's time counts on each.

    Its clock is agreed upon, too, so that all ranks decide alike when to stop.
    """

    def __init__(self, local: Stopwatch, peers: RankGroup, refresh: Callable[[], object]) -> None:
        """Take this rank's own time with `local`, after `refresh`, which is not timed."""
        self._local = local
        self._peers = peers
        self._refresh = refresh
        self._start_s = time.perf_counter()
        self._agreed_s = 0.0

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        """Return µs of the slowest rank."""
        self._refresh()
        self._peers.agree(0.0)
        elapsed_us = self._local.time_calls_us(call, first, num_calls)
        slowest_us, self._agreed_s = self._peers.agree(
            elapsed_us, time.perf_counter() - self._start_s
        )
        return slowest_us

    def now_s(self) -> float:
        """Return the time since the beginning, as the slowest rank had it after a sample."""
        return self._agreed_s


class Queue:
    """Keeps a device busy while the host queues what is to be timed.

    Launch overhead then does not enter the time of short kernels.
    """

    def __init__(self, device: torch.device) -> None:
        """Hold the current stream of `device`."""
        self._device = device
        self._head_start_us = _HEAD_START_US_MIN

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold what is queued inside, for as long as queueing took the last time."""
        with torch.cuda.device(self._device):
            torch.cuda._sleep(int(self._head_start_us * _CYCLES_PER_US))  # noqa: SLF001 - no other
        queued_ns = time.perf_counter_ns()
        yield
        queueing_us = (time.perf_counter_ns() - queued_ns) / NS_PER_US
        wanted_us = _HEAD_START_RATIO * queueing_us
        self._head_start_us = min(max(wanted_us, _HEAD_START_US_MIN), _HEAD_START_US_MAX)


class CudaRankStopwatch:
    """Device time between two events around calls that the devices of all ranks begin together."""

    def __init__(self, device: torch.device, align: Callable[[], object]) -> None:
        """Queue `align`, in which devices wait for each other, before the first event."""
        self._device = device
        self._align = align
        self._queue = Queue(device)

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        """Return µs of device time for the calls together."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        with self._queue.held():
            self._align()
            start.record(stream)
            for index in range(first, first + num_calls):
                call(index)
            end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * US_PER_MS

    def now_s(self) -> float:
        """Return the host's monotonic clock."""
        return time.perf_counter()


def choose_stopwatch(device: torch.device, align: Callable[[], object]) -> Stopwatch:
    """Return what takes a rank's own time on its device."""
    return CpuStopwatch() if device.type == "cpu" else CudaRankStopwatch(device, align)


class OverlapStopwatch:
    """Times calls while other calls run, which go on until the timed ones end.

    All ranks make the same number of concurrent calls. Where those ended first on some rank, all
    take the time again with more of them. `pair_ratio` is how many of the concurrent calls take as
    long as one timed call, each alone.
    """

    def __init__(self, companion: Callable[[], object], pair_ratio: float, agree: Agree) -> None:
        """Run `companion` during the timed calls; ranks `agree` on the largest value of all."""
        self._companion = companion
        self._ratio = _FIRST_LENGTH_RATIO * pair_ratio
        self._agree = agree

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        """Return µs for the calls together.

        Raises:
            CollectiveTimingError: the concurrent calls ended first, however many they were.

        """
        for _ in range(_NUM_ATTEMPTS):
            num_companion = math.ceil(self._ratio * num_calls)
            self._agree(0.0)
            elapsed_us, has_outlasted = self._time_once_us(call, first, num_calls, num_companion)
            [was_short] = self._agree(0.0 if has_outlasted else 1.0)
            if not was_short:
                return elapsed_us
            self._ratio *= _GROWTH_RATIO
        raise CollectiveTimingError("what runs concurrently always ended first")

    def now_s(self) -> float:
        """Return the host's monotonic clock."""
        return time.perf_counter()

    def _time_once_us(
        self, call: IndexedCall, first: int, num_calls: int, num_companion: int
    ) -> tuple[float, bool]:
        """Return µs of the timed calls, and whether the concurrent ones ended after them."""
        companion = _Thread(self._companion, num_companion)
        companion.start()
        start_ns = time.perf_counter_ns()
        for index in range(first, first + num_calls):
            call(index)
        end_ns = time.perf_counter_ns()
        companion.finish()
        return (end_ns - start_ns) / NS_PER_US, companion.end_ns >= end_ns


class CudaOverlapStopwatch(OverlapStopwatch):
    """Takes the time between events of one stream while the concurrent calls run in another one."""

    def __init__(
        self, companion: Callable[[], object], pair_ratio: float, agree: Agree, device: torch.device
    ) -> None:
        """Use two streams of `device`."""
        super().__init__(companion, pair_ratio, agree)
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._queue = Queue(device)

    def _time_once_us(
        self, call: IndexedCall, first: int, num_calls: int, num_companion: int
    ) -> tuple[float, bool]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        start, end, companion_end = events
        main = torch.cuda.current_stream(self._device)
        with self._queue.held():
            self._side.wait_stream(main)
            with torch.cuda.stream(self._side):
                for _ in range(num_companion):
                    self._companion()
                companion_end.record(self._side)
            start.record(main)
            for index in range(first, first + num_calls):
                call(index)
            end.record(main)
        end.synchronize()
        companion_end.synchronize()
        return float(start.elapsed_time(end)) * US_PER_MS, end.elapsed_time(companion_end) >= 0.0


class _Thread:
    """Makes calls in a thread, and keeps when the last one ended and what went wrong."""

    def __init__(self, call: Callable[[], object], num_calls: int) -> None:
        self._call = call
        self._num_calls = num_calls
        self._begun = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="foretoken-beside")
        self.end_ns = 0

    def start(self) -> None:
        """Start, and wait until the calls have begun."""
        self._thread.start()
        self._begun.wait()

    def finish(self) -> None:
        """Wait for the last call; what went wrong in the thread is raised here."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        self._begun.set()
        try:
            for _ in range(self._num_calls):
                self._call()
        except Exception as err:  # noqa: BLE001 - raised in the thread that waits
            self._error = err
        self.end_ns = time.perf_counter_ns()
