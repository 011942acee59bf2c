"""KV caches on their way between replicas: ports that send or receive one after the other."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from foretoken.simulator.cluster.event_queue import EventKind, EventQueue


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """The KV cache of a request from one port to another, and how long it keeps each."""

    request: int
    sender: Hashable
    receiver: Hashable
    sender_ns: int
    receiver_ns: int

    @property
    def ports(self) -> tuple[tuple[Hashable, int], ...]:
        """Its ports, and how long it keeps each."""
        return (self.sender, self.sender_ns), (self.receiver, self.receiver_ns)


class KvNetwork:
    """Ports with a queue each, in the order in which transfers were asked for.

    A transfer starts when it is the first at both of its ports, so none overtakes another and the
    one asked for first is never held up by a later one. The faster port is free again before the
    slower one, so that it serves several slow ones in turn at all of its rate. It lands a latency
    after it has left both.
    """

    def __init__(
        self, events: EventQueue, latency_ns: int, land: Callable[[Transfer, int], None]
    ) -> None:
        self._events = events
        self._latency_ns = latency_ns
        self._land = land
        self._queues: defaultdict[Hashable, deque[Transfer]] = defaultdict(deque)
        self._moving: set[Transfer] = set()
        # How long each port was busy with transfers that went through.
        self.busy_ns: defaultdict[Hashable, int] = defaultdict(int)

    def ask(self, transfer: Transfer, now_ns: int) -> None:
        """Put a transfer last in the queues of its ports."""
        self._queues[transfer.sender].append(transfer)
        self._queues[transfer.receiver].append(transfer)
        self._start_first(transfer.sender, now_ns)

    def give_up(self, transfer: Transfer, now_ns: int) -> None:
        """Take a transfer off its ports, under way or not; it will not land."""
        self._moving.discard(transfer)
        for port, _ in transfer.ports:
            self._leave(transfer, port, now_ns)

    def _start_first(self, port: Hashable, now_ns: int) -> None:
        queue = self._queues[port]
        if not queue or queue[0] in self._moving:
            return
        first = queue[0]
        if any(self._queues[end][0] is not first for end, _ in first.ports):
            return
        self._moving.add(first)
        for end, busy_ns in first.ports:
            self._events.push(
                now_ns + busy_ns, EventKind.PORT_FREE, partial(self._free, first, end)
            )

    def _free(self, transfer: Transfer, port: Hashable, _: int, now_ns: int) -> None:
        if transfer not in self._moving:
            return
        self._leave(transfer, port, now_ns)
        if all(transfer not in self._queues[end] for end, _ in transfer.ports):
            for end, busy_ns in transfer.ports:
                self.busy_ns[end] += busy_ns
            land = partial(self._arrive, transfer)
            self._events.push(now_ns + self._latency_ns, EventKind.LANDING, land)

    def _arrive(self, transfer: Transfer, _: int, now_ns: int) -> None:
        if transfer in self._moving:
            self._moving.remove(transfer)
            self._land(transfer, now_ns)

    def _leave(self, transfer: Transfer, port: Hashable, now_ns: int) -> None:
        if transfer in self._queues[port]:
            self._queues[port].remove(transfer)
            self._start_first(port, now_ns)
