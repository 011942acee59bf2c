"""What takes too long is acted on once; what ends in time never."""

from hypothesis import given
from hypothesis import strategies as st

from foretoken.app.admission import Lane
from foretoken.app.call_guard import TimeLimits


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_action_is_done_once_and_not_before_its_time() -> None:
    clock = _Clock()
    limits = TimeLimits(clock)
    done: list[str] = []
    with limits.act_after(5.0, lambda: done.append("late")):
        limits.act()
        clock.now_s = 4.9
        limits.act()
        assert [] == done
        clock.now_s = 5.0
        limits.act()
        limits.act()
        assert ["late"] == done
    assert ["late"] == done


def test_nothing_is_done_about_what_has_ended() -> None:
    clock = _Clock()
    limits = TimeLimits(clock)
    done: list[str] = []
    with limits.act_after(5.0, lambda: done.append("inner")):
        pass
    clock.now_s = 10.0
    limits.act()
    assert [] == done


def test_each_block_has_its_own_time() -> None:
    clock = _Clock()
    limits = TimeLimits(clock)
    done: list[str] = []
    with (
        limits.act_after(5.0, lambda: done.append("outer")),
        limits.act_after(2.0, lambda: done.append("inner")),
    ):
        clock.now_s = 3.0
        limits.act()
        assert ["inner"] == done
        clock.now_s = 6.0
        limits.act()
    assert ["inner", "outer"] == done


@given(st.integers(1, 5), st.integers(0, 5), st.lists(st.booleans(), max_size=60))
def test_a_lane_never_holds_more_calls_than_threads_and_queue(
    num_threads: int, max_queued: int, comes: list[bool]
) -> None:
    lane = Lane("/service/Method", num_threads, max_queued)
    expected = 0
    for is_new in comes:
        if is_new:
            has_room = expected < num_threads + max_queued
            assert has_room == lane.enter()
            expected += has_room
        elif expected:
            lane.leave()
            expected -= 1
        assert expected == lane.num_calls
