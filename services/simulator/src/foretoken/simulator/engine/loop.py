"""The clock: pending events in order of time."""

import heapq
from collections.abc import Iterator
from typing import Any

from foretoken.simulator.engine.events import Event, EventKind


class EventLoop:
    """Events by time, kind and order of posting; time is in integer ns and never goes back."""

    def __init__(self) -> None:
        self._pending: list[Event] = []
        self._num_posted = 0
        self.now_ns = 0

    def post(self, time_ns: int, kind: EventKind, payload: Any) -> None:
        """Let an event happen at `time_ns`.

        Raises:
            ValueError: that time has passed.

        """
        if time_ns < self.now_ns:
            raise ValueError(f"an event at {time_ns} ns was posted at {self.now_ns} ns")
        self._num_posted += 1
        heapq.heappush(self._pending, Event(time_ns, kind, self._num_posted, payload))

    def instants(self) -> Iterator[list[Event]]:
        """Yield the events of each instant together, until none is pending.

        What is posted for the same instant meanwhile comes as an instant of its own.
        """
        pending = self._pending
        while pending:
            events = [heapq.heappop(pending)]
            self.now_ns = events[0].time_ns
            while pending and pending[0].time_ns == self.now_ns:
                events.append(heapq.heappop(pending))
            yield events
