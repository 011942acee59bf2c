"""The way of a request and its KV cache from the engine of its prompt to the one that answers."""

import enum
import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from foretoken.domain.units import NS_PER_S
from foretoken.simulator.cluster.event_queue import EventKind, EventQueue
from foretoken.simulator.cluster.gate import Gate
from foretoken.simulator.cluster.pool_state import PoolState
from foretoken.simulator.cluster.routing import RoutedRequest
from foretoken.simulator.cluster.setup import ClusterSetup
from foretoken.simulator.serving.record import NOT_REACHED


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
        # When those that move started; who waits behind one comes back when it leaves a port.
        self._started_ns: dict[Transfer, int] = {}
        self._expected_ns: dict[Hashable, int] = {}
        # How long each port was busy with transfers that went through.
        self.busy_ns: defaultdict[Hashable, int] = defaultdict(int)

    def ask(self, transfer: Transfer, now_ns: int) -> None:
        """Put a transfer last in the queues of its ports."""
        for port, _ in transfer.ports:
            self._queues[port].append(transfer)
        self._go_on(transfer.sender, now_ns)
        self._go_on(transfer.receiver, now_ns)

    def give_up(self, transfer: Transfer, now_ns: int) -> None:
        """Take a transfer off its ports, under way or not; it will not land."""
        started_ns = self._started_ns.pop(transfer, now_ns)
        if all(started_ns + busy_ns <= now_ns for _, busy_ns in transfer.ports):
            self._count(transfer)
        for port, _ in transfer.ports:
            if transfer in self._queues[port]:
                self._queues[port].remove(transfer)
                self._go_on(port, now_ns)

    def _go_on(self, port: Hashable, now_ns: int) -> None:
        """Start the first transfer of a port if it can, else come back when it may."""
        first = self._first_of(port, now_ns)
        if first is None:
            return
        if first not in self._started_ns:
            if any(self._first_of(end, now_ns) is not first for end, _ in first.ports):
                return
            self._started_ns[first] = now_ns
            through_ns = now_ns + max(first.sender_ns, first.receiver_ns)
            land = partial(self._arrive, first)
            self._events.push(through_ns + self._latency_ns, EventKind.LANDING, land)
        for end, busy_ns in first.ports:
            self._expect(end, self._started_ns[first] + busy_ns)

    def _first_of(self, port: Hashable, now_ns: int) -> Transfer | None:
        """Return the first transfer that has not left a port yet."""
        queue = self._queues[port]
        while queue and queue[0] in self._started_ns:
            busy_ns = queue[0].sender_ns if queue[0].sender == port else queue[0].receiver_ns
            if now_ns < self._started_ns[queue[0]] + busy_ns:
                break
            queue.popleft()
        return queue[0] if queue else None

    def _expect(self, port: Hashable, free_ns: int) -> None:
        """Come back when a port is free, where a transfer waits for that."""
        if len(self._queues[port]) > 1 and self._expected_ns.get(port) != free_ns:
            self._expected_ns[port] = free_ns
            self._events.push(
                free_ns, EventKind.PORT_FREE, lambda _, then_ns: self._go_on(port, then_ns)
            )

    def _arrive(self, transfer: Transfer, _: int, now_ns: int) -> None:
        if transfer in self._started_ns:
            for port, _busy_ns in transfer.ports:
                self._first_of(port, now_ns)
            del self._started_ns[transfer]
            self._count(transfer)
            self._land(transfer, now_ns)

    def _count(self, transfer: Transfer) -> None:
        for port, busy_ns in transfer.ports:
            self.busy_ns[port] += busy_ns


class Stage(enum.Enum):
    """Where a request is."""

    AWAY = "not sent, in the frontend, or done"
    AT_ROUTER = "waits for a replica that takes it"
    ON_ENGINE = "on the engine that computes its prompt"
    PREFILLED = "waits for a decode replica that takes it"
    WITHOUT_ROOM = "waits for KV blocks of its decode engine"
    MOVING = "its KV cache moves there"
    DECODING = "on the engine that computes the rest of its answer"


@dataclass(slots=True)
class Journey:
    """A request: where it is, and what the record says of its way; engines count through all pools.

    `first_engine` computes its prompt, `engine` its answer. `try_number` counts its tries: what was
    planned in one that failed does not happen.
    """

    index: int
    priority: int
    stage: Stage = Stage.AWAY
    try_number: int = 0
    arrival_ns: int = NOT_REACHED
    prefilled_ns: int = NOT_REACHED
    transferred_ns: int = NOT_REACHED
    first_engine: int = NOT_REACHED
    engine: int = NOT_REACHED
    outcome: int = 0
    transfer: Transfer | None = None


class Handover:
    """Finds a decode engine, waits for its KV blocks, moves the cache, and frees it where it was.

    A request keeps its blocks on the prefill engine until they are all on the decode engine, so a
    full decode pool holds the prefill pool up.
    """

    def __init__(
        self,
        setup: ClusterSetup,
        pool_of: Callable[[int], PoolState],
        gate: Gate,
        journeys: Sequence[Journey],
        events: EventQueue,
    ) -> None:
        self._kv = setup.kv_transfer
        self._pool_of = pool_of
        self.gate = gate
        self._journeys = journeys
        self.network = KvNetwork(events, self._kv.latency_ns, self._land)
        # By decode engine: (-priority, since when, index, number of the try)
        self._without_room: defaultdict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        self._requests: dict[int, RoutedRequest] = {}

    def offer(self, journey: Journey, now_ns: int) -> None:
        """Take over a request whose prompt is computed."""
        journey.stage = Stage.PREFILLED
        journey.prefilled_ns = now_ns
        self.gate.offer(journey.index, journey.priority, now_ns)

    def dispatch(self, now_ns: int) -> None:
        """Find decode engines for those that wait for one."""
        self.gate.dispatch(now_ns, self._send)

    def use_room(self, engine: int, now_ns: int) -> None:
        """Let requests that wait for blocks of an engine have what became free."""
        queue = self._without_room.get(engine)
        while queue:
            *_, index, try_number = queue[0]
            journey = self._journeys[index]
            is_current = journey.stage is Stage.WITHOUT_ROOM and journey.try_number == try_number
            if is_current and not self._reserve(journey, now_ns):
                return
            heapq.heappop(queue)

    def abandon(self, journey: Journey, now_ns: int) -> None:
        """Forget a request of which an engine failed, and free what the other one keeps of it."""
        if journey.stage is Stage.PREFILLED:
            self.gate.withdraw(journey.index, now_ns)
        self._requests.pop(journey.index, None)
        journey.transferred_ns = NOT_REACHED
        if journey.transfer:
            self.network.give_up(journey.transfer, now_ns)
            journey.transfer = None
        self.leave_prefill(journey, now_ns)
        if journey.stage in (Stage.WITHOUT_ROOM, Stage.MOVING):
            self._leave_decode(journey, now_ns)

    def leave_prefill(self, journey: Journey, now_ns: int) -> None:
        """Free what is kept of a request where its prompt was computed, unless that failed."""
        pool = self._pool_of(journey.first_engine)
        if journey.index in pool.replica_of(journey.first_engine).requests:
            pool.engines.release(journey.index, now_ns)
            pool.take_off(journey.first_engine, journey.index, now_ns)

    def _leave_decode(self, journey: Journey, now_ns: int) -> None:
        """Free what a decode engine keeps for a request, unless that failed; others may use it."""
        pool = self._pool_of(journey.engine)
        if journey.index not in pool.replica_of(journey.engine).requests:
            return
        if journey.stage is Stage.MOVING:
            pool.engines.release(journey.index, now_ns)
        journey.stage = Stage.AWAY
        pool.take_off(journey.engine, journey.index, now_ns)
        self.use_room(journey.engine, now_ns)

    def _send(self, pool: PoolState, name: int, request: RoutedRequest, now_ns: int) -> None:
        journey = self._journeys[request.number]
        journey.engine = pool.put(name, request, now_ns)
        journey.stage = Stage.WITHOUT_ROOM
        self._requests[request.number] = request
        entry = (-journey.priority, now_ns, journey.index, journey.try_number)
        heapq.heappush(self._without_room[journey.engine], entry)
        self.use_room(journey.engine, now_ns)

    def _reserve(self, journey: Journey, now_ns: int) -> bool:
        """Take blocks for a request and let its cache move; False where they are not free.

        Requests that the engine preempted come first. Source: vLLM, where they are at the head of
        the queue in which a request that comes waits for its blocks.
        """
        pool, sender = self._pool_of(journey.engine), self._pool_of(journey.first_engine)
        place = journey.engine - pool.first_engine
        # Of what waits on a decode engine only the preempted have a prompt to compute.
        if pool.engines.load_of(place).num_outstanding_tokens:
            return False
        if not pool.engines.reserve(place, journey.index):
            return False
        computing_ns = 0
        if self._kv.overlaps_prefill and journey.prefilled_ns == now_ns:
            # There was room all the time, so layers could move as they were computed.
            computing_ns = now_ns - sender.engines.scheduled_ns(journey.index)
        journey.stage = Stage.MOVING
        journey.transfer = Transfer(
            request=journey.index,
            sender=sender.name_at(journey.first_engine),
            receiver=pool.name_at(journey.engine),
            sender_ns=self._busy_ns(journey.index, sender, computing_ns),
            receiver_ns=self._busy_ns(journey.index, pool, computing_ns),
        )
        self.network.ask(journey.transfer, now_ns)
        return True

    def _busy_ns(self, index: int, pool: PoolState, computing_ns: int) -> int:
        """Return how long a port is busy with what is left after the prompt was computed."""
        whole_ns = self._bytes_of(index) / pool.setup.port_bytes_per_s * NS_PER_S
        if computing_ns == 0:
            return round(whole_ns)
        return round(max(whole_ns - computing_ns, whole_ns / self._kv.num_layers))

    def _bytes_of(self, index: int) -> float:
        return self._kv.bytes_of(self._requests[index].num_prefill_tokens)

    def _land(self, transfer: Transfer, now_ns: int) -> None:
        """Let a request decode whose cache is there."""
        journey = self._journeys[transfer.request]
        pool, sender = self._pool_of(journey.engine), self._pool_of(journey.first_engine)
        num_bytes = round(self._bytes_of(journey.index))
        pool.sent_bytes += num_bytes
        sender.sent_bytes += num_bytes
        journey.stage = Stage.DECODING
        journey.transfer = None
        journey.transferred_ns = now_ns
        pool.submit(journey.engine, self._requests.pop(journey.index), now_ns)
        self.leave_prefill(journey, now_ns)
