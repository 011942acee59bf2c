"""What is noticed on a CPU while a case is timed."""

from collections.abc import Iterator

import pytest

from foretoken.profiler.local_device import find_local_device
from foretoken.profiler.timing.watch import BlindWatch, CpuWatch, Observation, open_watch


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
