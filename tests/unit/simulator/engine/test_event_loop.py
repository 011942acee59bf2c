import pytest

from foretoken.simulator.engine.events import EventKind
from foretoken.simulator.engine.loop import EventLoop


def test_events_come_by_time_then_kind_then_order_of_posting() -> None:
    loop = EventLoop()
    loop.post(5, EventKind.STEP_DONE, "done")
    loop.post(5, EventKind.ARRIVAL, "second")
    loop.post(5, EventKind.ARRIVAL, "third")
    loop.post(3, EventKind.STAGE_FREE, "first")
    seen = [(loop.now_ns, [event.payload for event in events]) for events in loop.instants()]
    assert seen == [(3, ["first"]), (5, ["second", "third", "done"])]


def test_what_is_posted_meanwhile_comes_in_its_turn() -> None:
    loop = EventLoop()
    loop.post(1, EventKind.ARRIVAL, 0)
    seen = []
    for events in loop.instants():
        seen += [(loop.now_ns, event.payload) for event in events]
        if len(seen) < 3:
            loop.post(loop.now_ns + len(seen) - 1, EventKind.ARRIVAL, len(seen))
    assert seen == [(1, 0), (1, 1), (2, 2)]


def test_the_past_is_closed() -> None:
    loop = EventLoop()
    loop.post(7, EventKind.ARRIVAL, None)
    next(loop.instants())
    with pytest.raises(ValueError, match="posted at 7 ns"):
        loop.post(6, EventKind.ARRIVAL, None)
