"""Clocks read around calls."""

import pytest
import torch

from foretoken.profiler.timing.stopwatch import CpuStopwatch, CudaStopwatch


def test_cpu_stopwatch_reads_its_clock_around_the_calls() -> None:
    ticks = iter([5_000, 47_000])
    seen: list[int] = []
    stopwatch = CpuStopwatch(lambda: next(ticks))
    assert stopwatch.time_calls_us(seen.append, 4, 3) == 42.0
    assert seen == [4, 5, 6]


def test_a_thread_without_a_core_takes_no_time() -> None:
    """The wall clock runs on for caps; the calls' time stands still while another program runs."""
    wall, work = iter([90_000]), iter([5_000, 7_000])
    stopwatch = CpuStopwatch(lambda: next(wall), lambda: next(work))
    assert stopwatch.time_calls_us(lambda _: None, 0, 1) == 2.0
    assert stopwatch.now_s() == pytest.approx(90e-6)


def test_cpu_stopwatch_tells_its_clock_in_seconds() -> None:
    assert CpuStopwatch(lambda: 2_500_000_000).now_s() == 2.5


def test_cuda_stopwatch_asks_nothing_of_the_device_until_it_is_opened() -> None:
    """So that a service can be put together on a machine without one."""
    stopwatch = CudaStopwatch(torch.device("cuda"), flush_bytes=2**20)
    assert stopwatch.now_s() > 0.0
