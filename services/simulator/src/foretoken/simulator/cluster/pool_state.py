"""A pool while the cluster runs: which of its replicas serve, and the requests on them."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from foretoken.simulator.cluster.event_queue import EventKind, EventQueue
from foretoken.simulator.cluster.routing import (
    EngineLoad,
    RoutedRequest,
    Router,
    find_router,
)
from foretoken.simulator.cluster.setup import PoolSetup
from foretoken.simulator.engine.layout import NEVER_NS
from foretoken.simulator.engine.pool import EnginePool
from foretoken.simulator.serving.lora import AdapterCache
from foretoken.simulator.serving.record import ReplicaSpan


class Phase(enum.Enum):
    """What a replica of a pool does; it holds devices in all but the first."""

    OFF = "nothing"
    STARTING = "start"
    READY = "serve"
    DRAINING = "serve what it has"
    DOWN = "restart after a failure"


# In these a replica serves.
SERVING = (Phase.READY, Phase.DRAINING)


class Progress(enum.Enum):
    """How far a request on a replica is."""

    COMING = "its KV cache is not there yet"
    SUBMITTED = "its engine has it"
    WITH_ADAPTER = "it has asked for an adapter, and its engine has it once that is there"


@dataclass(slots=True)
class LiveReplica:
    """A replica: its phase, since when, and the requests on it.

    `phase_number` counts its phases and `life` the times it began or ceased to serve: what was
    planned in one that is over does not happen.
    """

    phase: Phase = Phase.OFF
    phase_number: int = 0
    life: int = 0
    since_ns: int = 0
    requests: dict[int, Progress] = field(default_factory=dict)


@dataclass(slots=True)
class Usage:
    """Requests on a pool and at its router, and their sum over time since it was last asked for."""

    num_outstanding: int = 0
    num_queued: int = 0
    num_arrivals: int = 0
    since_ns: int = 0
    counted_ns: int = 0
    request_ns: int = 0

    def change(self, now_ns: int, *, outstanding: int = 0, queued: int = 0) -> None:
        """Count requests that come or go."""
        num_requests = self.num_outstanding + self.num_queued
        self.request_ns += num_requests * (now_ns - self.counted_ns)
        self.counted_ns = now_ns
        self.num_outstanding += outstanding
        self.num_queued += queued

    def take_mean(self, now_ns: int) -> float:
        """Return the mean number of requests since the last time this was asked."""
        self.change(now_ns)
        mean = self.request_ns / max(now_ns - self.since_ns, 1)
        self.since_ns, self.request_ns, self.num_arrivals = now_ns, 0, 0
        return mean


class PoolState:
    """Replicas of one pool, by number; elsewhere a replica is named by its first engine.

    Engines are numbered through all pools: this one's from `first_engine` on.
    """

    def __init__(
        self,
        engines: EnginePool,
        setup: PoolSetup,
        first_engine: int,
        events: EventQueue,
        seed: int,
    ) -> None:
        self.engines = engines
        self.setup = setup
        self.first_engine = first_engine
        self._events = events
        self.replicas = [LiveReplica() for _ in range(setup.num_replicas_max)]
        self.usage = Usage()
        self._spans: list[ReplicaSpan] = []
        self.num_failures = self.num_scale_ups = self.num_scale_downs = 0
        self.sent_bytes = 0
        # Requests that are to come to each engine.
        self._num_coming = [0] * engines.num_engines
        # Names of the replicas that take requests, ascending.
        self.ready: Sequence[int] = ()
        self._size = setup.engines_per_replica
        self._routers: list[Router] = []
        if self._size > 1:
            router = find_router(setup.engines.router)
            self._routers = [router({}, seed) for _ in self.replicas]
        self.adapters: list[AdapterCache] = []
        if setup.adapters:
            self.adapters = [
                AdapterCache(setup.adapters.max_loaded, setup.adapters.load_ns)
                for _ in range(engines.num_engines)
            ]

    def name_of(self, number: int) -> int:
        """Return the name of a replica: its first engine."""
        return self.first_engine + number * self._size

    def name_at(self, engine: int) -> int:
        """Return the name of the replica that an engine, by its number in all pools, belongs to."""
        return self.name_of((engine - self.first_engine) // self._size)

    def replica_of(self, engine: int) -> LiveReplica:
        """Return the replica that an engine, by its number in all pools, belongs to."""
        return self.replicas[(engine - self.first_engine) // self._size]

    def engines_of(self, number: int) -> range:
        """Return the engines of a replica, by their numbers in this pool."""
        return range(number * self._size, (number + 1) * self._size)

    def enter(self, number: int, phase: Phase, now_ns: int) -> None:
        """Let a replica begin a phase."""
        replica = self.replicas[number]
        self._spans += self._open_spans(number, now_ns)
        replica.phase = phase
        replica.phase_number += 1
        replica.since_ns = now_ns
        self.ready = [
            self.name_of(other)
            for other, each in enumerate(self.replicas)
            if each.phase is Phase.READY
        ]

    def numbers_of(self, *phases: Phase) -> list[int]:
        """Return the replicas in some phases."""
        return [number for number, each in enumerate(self.replicas) if each.phase in phases]

    def empty(self, number: int, now_ns: int) -> list[int]:
        """Take all requests off a replica, ascending, and everything it keeps."""
        replica = self.replicas[number]
        engines = self.engines_of(number)
        self.engines.withdraw(engines[0], now_ns)
        for engine in engines:
            self._num_coming[engine] = 0
            if self.adapters:
                self.adapters[engine].clear()
        requests = sorted(replica.requests)
        replica.requests.clear()
        self.usage.change(now_ns, outstanding=-len(requests))
        return requests

    def put(self, name: int, request: RoutedRequest, now_ns: int) -> int:
        """Count a request on a replica; return the engine of it, by its number in all pools."""
        number = (name - self.first_engine) // self._size
        self.replicas[number].requests[request.number] = Progress.COMING
        self.usage.change(now_ns, outstanding=1)
        engine = name
        if self._size > 1:
            names = range(name, name + self._size)
            loads = PoolLoads(dict.fromkeys(names, self))
            engine = self._routers[number].choose(request, names, loads)
        self._num_coming[engine - self.first_engine] += 1
        return engine

    def submit(self, engine: int, request: RoutedRequest, now_ns: int) -> None:
        """Give an engine, by its number in all pools, a request once its adapter is there."""
        place, requests = engine - self.first_engine, self.replica_of(engine).requests
        self._num_coming[place] -= 1
        if not self.adapters or request.adapter < 0:
            requests[request.number] = Progress.SUBMITTED
            self.engines.submit(place, request.number, now_ns)
            return
        requests[request.number] = Progress.WITH_ADAPTER
        self.adapters[place].ask(request.number, request.adapter, now_ns)
        self._submit_loaded(place, now_ns)

    def _submit_loaded(self, place: int, now_ns: int) -> None:
        """Submit what an engine's adapters let start, and come back when the next is loaded."""
        cache = self.adapters[place]
        for request in cache.take_ready(now_ns):
            self.engines.submit(place, request, now_ns)
        if now_ns < cache.next_ns < NEVER_NS:
            self._events.push(
                cache.next_ns,
                EventKind.START,
                lambda _, then_ns: self._submit_loaded(place, then_ns),
            )

    def take_off(self, engine: int, request: int, now_ns: int) -> None:
        """Count a request no longer on the replica of an engine; the last may end its draining."""
        place = engine - self.first_engine
        number = place // self._size
        replica = self.replicas[number]
        progress = replica.requests.pop(request)
        self.usage.change(now_ns, outstanding=-1)
        self._num_coming[place] -= progress is Progress.COMING
        if progress is Progress.WITH_ADAPTER:
            self.adapters[place].release(request, now_ns)
            self._submit_loaded(place, now_ns)
        if replica.phase is Phase.DRAINING and not replica.requests:
            self.stop(number, now_ns)

    def stop(self, number: int, now_ns: int) -> None:
        """Give a replica's devices back; nothing is on it."""
        self.replicas[number].life += 1
        self.empty(number, now_ns)
        self.enter(number, Phase.OFF, now_ns)

    def engine_load(self, engine: int) -> EngineLoad:
        """Return the load of one engine, by its number in all pools.

        Requests wait there too whose KV cache or adapter is on its way.
        """
        place = engine - self.first_engine
        num_more = self._num_coming[place]
        if self.adapters:
            num_more += self.adapters[place].num_waiting
        return self.engines.load_of(place, num_more)

    def replica_load(self, name: int) -> EngineLoad:
        """Return the load of a replica: that of its engines together."""
        if self._size == 1:
            return self.engine_load(name)
        loads = [self.engine_load(engine) for engine in range(name, name + self._size)]
        waiting, running, tokens, kv = zip(*loads, strict=True)
        return EngineLoad(sum(waiting), sum(running), sum(tokens), sum(kv) / self._size)

    def spans(self, now_ns: int) -> list[ReplicaSpan]:
        """Return when engines were held until now, by engine and in order."""
        going = [self._open_spans(number, now_ns) for number in range(len(self.replicas))]
        spans = [*self._spans, *chain.from_iterable(going)]
        return sorted(spans, key=lambda span: (span.engine, span.start_ns))

    def _open_spans(self, number: int, now_ns: int) -> list[ReplicaSpan]:
        """Return for what its engines are held since the phase of a replica began."""
        replica = self.replicas[number]
        if replica.phase is Phase.OFF or now_ns <= replica.since_ns:
            return []
        return [
            ReplicaSpan(
                engine=self.first_engine + engine,
                start_ns=replica.since_ns,
                end_ns=now_ns,
                is_ready=replica.phase in SERVING,
            )
            for engine in self.engines_of(number)
        ]


class PoolLoads(Mapping[int, EngineLoad]):
    """Loads of engines as they are now, found out when one looks."""

    def __init__(self, pool_of: Mapping[int, PoolState], *, of_replicas: bool = False) -> None:
        self._pool_of = pool_of
        self._of_replicas = of_replicas

    def __getitem__(self, name: int) -> EngineLoad:
        """Return the load of an engine, or of the replica that it names."""
        pool = self._pool_of[name]
        return pool.replica_load(name) if self._of_replicas else pool.engine_load(name)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the names."""
        return iter(self._pool_of)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._pool_of)
