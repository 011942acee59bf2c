"""The timer's statistics and decisions, clocks around calls, what is noticed meanwhile."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.profiler.config import TimerSpec
from foretoken.profiler.local_device import find_local_device
from foretoken.profiler.timing.stopwatch import CpuStopwatch, CudaStopwatch, IndexedCall
from foretoken.profiler.timing.timer import (
    calls_per_sample,
    median_interval_ratio,
    summarize,
    time_case,
)
from foretoken.profiler.timing.watch import BlindWatch, CpuWatch, Observation, open_watch


class FakeStopwatch:
    """Every call takes what `latency_us(index)` says; time passes accordingly."""

    def __init__(self, latency_us: list[float]) -> None:
        self._latency_us = latency_us
        self._now_us = 0.0
        self.sample_sizes: list[int] = []

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        self.sample_sizes.append(num_calls)
        elapsed_us = 0.0
        for index in range(first, first + num_calls):
            call(index)
            elapsed_us += self._latency_us[index % len(self._latency_us)]
        self._now_us += elapsed_us
        return elapsed_us

    def now_s(self) -> float:
        return self._now_us * 1e-6


def test_interval_of_ten_samples_is_between_the_second_and_the_ninth() -> None:
    """Binomial(10, 1/2): P(X <= 1) = 0.0107 <= 0.025 < P(X <= 2); the ranks are 2 and 9."""
    samples = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 100.0]
    expected = (9.0 - 2.0) / (2 * 5.5)
    assert expected == median_interval_ratio(samples)


@pytest.mark.parametrize("samples", [[], [1.0], [1.0] * 5, [0.0] * 20])
def test_interval_is_infinite_where_there_is_none(samples: list[float]) -> None:
    assert math.inf == median_interval_ratio(samples)


def test_six_equal_samples_have_no_width() -> None:
    assert median_interval_ratio([7.0] * 6) == 0.0


@given(
    st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=300),
    st.floats(min_value=0.5, max_value=100.0),
)
def test_interval_ratio_does_not_depend_on_the_unit(samples: list[float], scale: float) -> None:
    scaled = median_interval_ratio([sample * scale for sample in samples])
    assert scaled == pytest.approx(median_interval_ratio(samples))


@given(st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=300))
def test_statistics_are_ordered(samples: list[float]) -> None:
    summary = summarize(samples)
    ordered = [
        summary.latency_us_min,
        summary.latency_us_p10,
        summary.latency_us_median,
        summary.latency_us_p90,
        summary.latency_us_max,
    ]
    assert sorted(ordered) == ordered
    assert summary.num_samples == len(samples)


def test_statistics_of_a_part_keep_their_count() -> None:
    half = summarize([2.0, 4.0, 6.0]).divided_by(2)
    assert (half.latency_us_median, half.latency_us_max, half.num_samples) == (2.0, 3.0, 3)


def test_steady_case_stops_at_the_fewest_samples() -> None:
    spec = TimerSpec(min_samples=10, warm_up_s_min=0.0)
    summary = time_case(lambda _: None, FakeStopwatch([250.0]), spec)
    assert summary.num_samples == 10
    assert summary.latency_us_median == 250.0


def test_short_calls_are_repeated_inside_a_sample() -> None:
    """2 µs calls need 100 repetitions to fill a sample of 200 µs."""
    stopwatch = FakeStopwatch([2.0])
    summary = time_case(lambda _: None, stopwatch, TimerSpec(sample_us_min=200.0))
    assert stopwatch.sample_sizes[-1] == 100
    assert summary.latency_us_median == pytest.approx(2.0)


def test_noisy_case_stops_at_its_time_cap() -> None:
    spec = TimerSpec(case_s_max=0.05, max_samples=10_000, warm_up_s_max=0.01)
    noise = [1000.0, 9000.0, 2000.0, 7000.0, 400.0]
    summary = time_case(lambda _: None, FakeStopwatch(noise), spec)
    assert summary.interval_ratio > spec.interval_ratio_target
    assert summary.num_samples * summary.latency_us_mean == pytest.approx(50_000, rel=0.2)


def test_very_slow_case_is_sampled_three_times() -> None:
    summary = time_case(lambda _: None, FakeStopwatch([3e6]), TimerSpec(case_s_max=0.1))
    assert summary.num_samples == 3


def test_warm_up_ignores_slow_first_calls() -> None:
    """Forty slow calls pass before latency settles; none of them is a sample."""
    stopwatch = FakeStopwatch([5000.0] * 40 + [300.0] * 100_000)
    summary = time_case(lambda _: None, stopwatch, TimerSpec(warm_up_s_min=0.21))
    assert summary.latency_us_max == 300.0


def test_input_sets_rotate() -> None:
    seen: list[int] = []
    time_case(seen.append, FakeStopwatch([100.0]), TimerSpec(warm_up_s_min=0.0))
    assert seen == list(range(len(seen)))


def test_warm_up_waits_for_a_steady_clock() -> None:
    """The clock climbs for 60 ms; the samples come after it."""
    stopwatch = FakeStopwatch([1000.0])
    warm_s: list[float] = []

    def read_clock() -> float:
        return min(1000.0 + 15.0 * stopwatch.now_s() * 1e3, 1900.0)

    time_case(
        lambda _: None,
        stopwatch,
        TimerSpec(warm_up_s_min=0.025, warm_up_s_max=0.5),
        read_clock=read_clock,
        when_warm=lambda: warm_s.append(stopwatch.now_s()),
    )
    (started_s,) = warm_s
    assert 0.06 <= started_s <= 0.1


def test_a_clock_that_never_settles_does_not_hold_up_the_case() -> None:
    stopwatch = FakeStopwatch([1000.0])
    readings = iter(range(1000, 100_000, 100))
    warm_s: list[float] = []
    time_case(
        lambda _: None,
        stopwatch,
        TimerSpec(warm_up_s_max=0.1),
        read_clock=lambda: float(next(readings)),
        when_warm=lambda: warm_s.append(stopwatch.now_s()),
    )
    assert warm_s == [pytest.approx(0.1, abs=0.003)]


def test_a_clock_nobody_tells_counts_as_steady() -> None:
    stopwatch = FakeStopwatch([1000.0])
    warm_s: list[float] = []
    time_case(
        lambda _: None,
        stopwatch,
        TimerSpec(warm_up_s_min=0.0),
        read_clock=lambda: None,
        when_warm=lambda: warm_s.append(stopwatch.now_s()),
    )
    assert warm_s[0] < 0.02


@given(st.floats(min_value=1e-3, max_value=1e7))
def test_calls_of_a_sample_fill_it_within_the_limit(latency_us: float) -> None:
    spec = TimerSpec(sample_us_min=1000.0, max_calls_per_sample=20)
    num_calls = calls_per_sample(latency_us, spec)
    assert 1 <= num_calls <= 20
    assert num_calls == 20 or num_calls * latency_us >= 1000.0


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


def clocks(*times: float) -> Iterator[float]:
    return iter(times)


@pytest.mark.parametrize(
    ("thread_s", "expected"),
    [
        (0.99, ()),
        (0.76, ()),
        (0.7, ("busy_machine: other work had the core for 30% of the time",)),
    ],
)
def test_time_without_the_core_is_doubted(thread_s: float, expected: tuple[str, ...]) -> None:
    wall, thread = clocks(5.0, 6.0), clocks(2.0, 2.0 + thread_s)
    watch = CpuWatch(0.25, lambda: next(wall), lambda: next(thread))
    watch.start()
    assert watch.finish().flags == expected


def test_a_look_shorter_than_the_clock_tick_says_nothing() -> None:
    wall, thread = clocks(0.0, 0.01), clocks(0.0, 0.0)
    watch = CpuWatch(0.25, lambda: next(wall), lambda: next(thread))
    watch.start()
    assert watch.finish().flags == ()


def test_a_cpu_is_watched_by_the_clocks_of_this_thread() -> None:
    watch = open_watch(find_local_device("cpu"), num_threads=1)
    watch.start()
    seen = watch.finish()
    assert isinstance(watch, CpuWatch)
    assert (seen.reading.power_w, seen.reading.throttle, watch.clock_mhz()) == (None, None, None)


def test_a_blind_watch_sees_nothing() -> None:
    watch = BlindWatch()
    watch.start()
    assert (watch.finish(), watch.clock_mhz()) == (Observation(), None)
