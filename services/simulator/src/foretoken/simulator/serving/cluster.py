"""Replicas behind a router: feeds them requests and keeps their time."""

from collections.abc import Callable, Sequence
from typing import Protocol

from foretoken.simulator.engine.events import Event, EventKind
from foretoken.simulator.engine.loop import EventLoop
from foretoken.simulator.serving.replica import Replica
from foretoken.simulator.serving.request import SimRequest

# Later than any event of a simulation.
_NEVER_NS = 2**63 - 1


class Router(Protocol):
    """Spreads requests over replicas."""

    def choose(self, num_outstanding: Sequence[int]) -> int:
        """Return the index of the replica for the next request."""


class Cluster:
    """Runs requests, in order of arrival, through replicas until all are done."""

    def __init__(
        self, replicas: Sequence[Replica], router: Router, requests: Sequence[SimRequest]
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._requests = requests
        self._num_arrived = 0
        self._num_posted = 0
        self._num_outstanding = [0] * len(replicas)
        self.num_refused = 0
        self.num_done = 0
        self.loop = EventLoop()

    def run(self, watch: Callable[[], None]) -> None:
        """Simulate to the end; `watch` is called after every instant."""
        self._post_arrivals()
        for events in self.loop.instants():
            touched = {self._handle(event) for event in events}
            for index in sorted(touched):
                self._launch(index)
            watch()

    @property
    def num_arrived(self) -> int:
        """Requests that have arrived so far."""
        return self._num_arrived

    def _handle(self, event: Event) -> int:
        if event.kind is EventKind.ARRIVAL:
            return self._arrive(event.payload)
        index = int(event.payload)
        if event.kind is EventKind.STEP_DONE:
            num_finished = len(self._replicas[index].complete())
            self._num_outstanding[index] -= num_finished
            self.num_done += num_finished
        return index

    def _arrive(self, request: SimRequest) -> int:
        self._num_arrived += 1
        if self._num_arrived == self._num_posted:
            self._post_arrivals()
        index = self._router.choose(self._num_outstanding)
        request.replica = index
        if self._replicas[index].enqueue(request):
            self._num_outstanding[index] += 1
        else:
            self.num_refused += 1
        return index

    def _post_arrivals(self) -> None:
        """Post the next arrival and those of the same instant, which one step may then serve."""
        next_ns = self._next_arrival_ns()
        while self._next_arrival_ns() == next_ns != _NEVER_NS:
            self.loop.post(next_ns, EventKind.ARRIVAL, self._requests[self._num_posted])
            self._num_posted += 1

    def _launch(self, index: int) -> None:
        replica = self._replicas[index]
        now_ns = self.loop.now_ns
        if not replica.can_launch(now_ns):
            return
        launch = replica.launch(now_ns, self._horizon_ns())
        if launch is None:
            return
        self.loop.post(launch.done_ns, EventKind.STEP_DONE, index)
        if launch.stage_free_ns < launch.done_ns:
            self.loop.post(launch.stage_free_ns, EventKind.STAGE_FREE, index)

    def _next_arrival_ns(self) -> int:
        if self._num_posted < len(self._requests):
            return self._requests[self._num_posted].arrival_ns
        return _NEVER_NS

    def _horizon_ns(self) -> int:
        if self._num_arrived < len(self._requests):
            return self._requests[self._num_arrived].arrival_ns
        return _NEVER_NS
