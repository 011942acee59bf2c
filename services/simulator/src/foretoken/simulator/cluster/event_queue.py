"""What will happen to a cluster and when, other than the steps of its engines."""

import enum
import heapq
from collections.abc import Callable
from itertools import count

from foretoken.simulator.engine.layout import NEVER_NS

# Called with the event's number and its time in ns.
Action = Callable[[int, int], None]


class EventKind(enum.IntEnum):
    """Kinds of events, in the order in which those of one instant happen."""

    PORT_FREE = 0
    LANDING = 1
    FAILURE = 2
    READY = 3
    START = 4
    LOAD_REPORT = 5
    SCALING = 6
    ARRIVAL = 7


# These come for ever and serve no request by themselves.
_TICKS = (EventKind.FAILURE, EventKind.LOAD_REPORT, EventKind.SCALING)


class EventQueue:
    """Events by time, then kind, then number."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, EventKind, int, Action]] = []
        self._numbers = count()
        self._num_awaited = 0

    @property
    def next_ns(self) -> int:
        """When the next event is; NEVER_NS where there is none."""
        return self._heap[0][0] if self._heap else NEVER_NS

    @property
    def has_awaited(self) -> bool:
        """Whether an event is to come that may move a request on."""
        return self._num_awaited > 0

    def push(self, time_ns: int, kind: EventKind, action: Action, number: int = -1) -> None:
        """Let something happen; events of a kind and time in the order of their numbers.

        Those without a number happen in the order in which they were pushed.
        """
        if number < 0:
            number = next(self._numbers)
        self._num_awaited += kind not in _TICKS
        heapq.heappush(self._heap, (time_ns, kind, number, action))

    def pop(self, now_ns: int) -> bool:
        """Let the next event of this instant happen; False where there is none."""
        if self.next_ns != now_ns:
            return False
        _, kind, number, action = heapq.heappop(self._heap)
        self._num_awaited -= kind not in _TICKS
        action(number, now_ns)
        return True
