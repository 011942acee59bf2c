"""Calls concurrent with the timed ones go on until those have ended, on every rank alike."""

import threading
import time

import pytest

from foretoken.profiler.ranks.group_spec import CollectiveTimingError
from foretoken.profiler.ranks.stopwatch import OverlapStopwatch


class Ranks:
    """Stands for the ranks of a group, which answer in this order, and 0 from then on."""

    def __init__(self, *answers: float) -> None:
        self._answers = list(answers)

    def agree(self, *values: float) -> list[float]:
        # The start of a sample is agreed upon, then whether concurrent calls were too short.
        return [self._answers.pop(0) if self._answers else 0.0 for _ in values]


class Beside:
    """Lets the timed calls wait until all concurrent calls have begun, and counts them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.all_threads: set[int] = set()
        self.released = threading.Event()

    def __call__(self) -> None:
        self.num_calls += 1
        self.all_threads.add(threading.get_ident())
        assert self.released.wait(60.0)


def test_timed_calls_run_while_the_others_do() -> None:
    beside, seen = Beside(), []

    def timed(index: int) -> None:
        seen.append(index)
        if index == 6:
            beside.released.set()

    elapsed_us = OverlapStopwatch(beside, 1.5, Ranks().agree).time_calls_us(timed, 5, 2)
    assert elapsed_us > 0.0
    assert [5, 6] == seen
    assert 6 == beside.num_calls
    assert threading.get_ident() not in beside.all_threads


def test_a_rank_whose_calls_beside_were_too_short_makes_all_begin_again() -> None:
    """With twice as many: 2, then 4, then 8 calls during one timed call."""
    beside, seen = Beside(), []

    def timed(index: int) -> None:
        seen.append(index)
        beside.released.set()

    ranks = Ranks(0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    OverlapStopwatch(beside, 1.0, ranks.agree).time_calls_us(timed, 0, 1)
    assert 3 == len(seen)
    assert beside.num_calls >= 2 + 4 + 8


def test_calls_beside_that_always_end_first_are_an_error() -> None:
    beside: list[threading.Thread] = []
    stopwatch = OverlapStopwatch(
        lambda: beside.append(threading.current_thread()), 1.0, lambda *values: list(values)
    )

    def outlast(_: int) -> None:
        while not beside:
            time.sleep(0.001)
        beside.pop().join()
        beside.clear()

    with pytest.raises(CollectiveTimingError, match="always ended first"):
        stopwatch.time_calls_us(outlast, 0, 1)


def test_what_goes_wrong_beside_is_raised() -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        OverlapStopwatch(fail, 1.0, Ranks().agree).time_calls_us(lambda _: None, 0, 1)
