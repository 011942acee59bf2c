"""What stands before the pools of a role: a router, what it knows of loads, and its queue."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.requests.cluster import RoutingSpec
from foretoken.domain.units import NS_PER_MS
from foretoken.simulator.cluster.pool_state import PoolLoads, PoolState
from foretoken.simulator.cluster.routing import EngineLoad, RoutedRequest, find_router
from foretoken.simulator.workload.request_plan import NONE, RequestPlan, find_sessions

# Tokens of a block of a prompt that no hash of the plan describes.
_BLOCK_TOKENS = 64
_NO_LOAD = EngineLoad(0, 0)

# Some of the pools behind a gate, by their places.
PoolChoice = tuple[int, ...]


class Send(Protocol):
    """Takes a request that has found a replica."""

    def __call__(self, pool: PoolState, name: int, request: RoutedRequest, now_ns: int) -> None:
        """Put a request on the replica of that name."""


class RequestDescriber:
    """Tells gates and their routers of the requests of a plan."""

    def __init__(self, plan: RequestPlan) -> None:
        self._plan = plan
        self._sessions = find_sessions(plan.follows, plan.joins).tolist()
        self._num_tokens = plan.num_prefill_tokens.tolist()
        self._offsets = plan.hash_offsets.tolist()
        self._adapters = None if plan.adapter is None else plan.adapter.tolist()
        self._streams = (2 * plan.stream + 1).tolist()
        self._prefixes = plan.prefix_tokens.tolist()

    def choose_pools(self, pools: Sequence[PoolState]) -> Sequence[PoolChoice]:
        """Return of each request the places of the pools that can ever hold it."""
        num_tokens = self._plan.num_prefill_tokens + self._plan.num_decode_tokens
        codes = np.zeros(len(num_tokens), dtype=np.int64)
        for place, pool in enumerate(pools):
            is_within = num_tokens <= pool.setup.engines.max_context
            codes |= (is_within & pool.engines.can_ever_hold) << place
        choices = {
            code: tuple(place for place in range(len(pools)) if code >> place & 1)
            for code in np.unique(codes).tolist()
        }
        return [choices[code] for code in codes.tolist()]

    def describe(self, index: int) -> RoutedRequest:
        """Return what a router may look at."""
        is_hashed = self._offsets[index + 1] > self._offsets[index]
        return RoutedRequest(
            number=index,
            num_prefill_tokens=self._num_tokens[index],
            session=self._sessions[index],
            adapter=NONE if self._adapters is None else self._adapters[index],
            block_tokens=self._plan.hash_block_tokens if is_hashed else _BLOCK_TOKENS,
            read_blocks=self._read_blocks,
        )

    def _read_blocks(self, index: int) -> NDArray[np.int64]:
        plan, num_tokens = self._plan, self._num_tokens[index]
        first, end = self._offsets[index], self._offsets[index + 1]
        if end > first:
            return plan.hashes[first : min(end, first + num_tokens // plan.hash_block_tokens)]
        # Even numbers are shared prefixes, odd ones the requests' own.
        blocks = np.full(num_tokens // _BLOCK_TOKENS, self._streams[index], dtype=np.int64)
        if self._prefixes[index]:
            blocks[: self._prefixes[index] // _BLOCK_TOKENS] = 2 * plan.prefix_stream[index]
        return blocks


class Gate:
    """Sends requests to replicas that take some; the others wait by priority, then by time.

    A request may go to some of the pools: those that can ever hold it.
    """

    def __init__(
        self,
        routing: RoutingSpec,
        pools: Sequence[PoolState],
        describer: RequestDescriber,
        seed: int,
    ) -> None:
        self.interval_ns = round(routing.load_interval_ms * NS_PER_MS)
        self.pools = pools
        self._router = find_router(routing.router)(routing.options, seed)
        self._max_outstanding = routing.max_outstanding
        self._describer = describer
        # Of each request the places of the pools that can ever hold it.
        self.choices = describer.choose_pools(pools)
        self._pool_of = {
            pool.name_of(number): pool for pool in pools for number in range(len(pool.replicas))
        }
        self._live = PoolLoads(self._pool_of, of_replicas=True)
        self._reported: dict[int, EngineLoad] = {}
        # By the pools that requests may go to: (-priority, when it came, index)
        self._queues: dict[PoolChoice, list[tuple[int, int, int]]] = {}
        self.num_queued = 0

    def report_loads(self) -> None:
        """Let the router know the loads of now."""
        self._reported = {name: self._live[name] for pool in self.pools for name in pool.ready}

    def offer(self, index: int, priority: int, now_ns: int) -> None:
        """Let a request wait for a replica of its pools; `dispatch` may find one at once."""
        choice = self.choices[index]
        heapq.heappush(self._queues.setdefault(choice, []), (-priority, now_ns, index))
        self._count(choice, 1, now_ns)
        for place in choice:
            self.pools[place].usage.num_arrivals += 1

    def withdraw(self, index: int, now_ns: int) -> bool:
        """Take a request that waits out of the queue; False where it does not."""
        choice = self.choices[index]
        queue = self._queues.get(choice, [])
        left = [entry for entry in queue if entry[2] != index]
        if len(left) == len(queue):
            return False
        heapq.heapify(left)
        self._queues[choice] = left
        self._count(choice, -1, now_ns)
        return True

    def dispatch(self, now_ns: int, send: Send) -> None:
        """Send all requests for which there is a replica that takes one more."""
        blocked: set[PoolChoice] = set()
        while self.num_queued:
            waiting = [c for c, queue in self._queues.items() if queue and c not in blocked]
            if not waiting:
                return
            choice = waiting[0] if len(waiting) == 1 else min(waiting, key=self._first_of)
            names = self._takers(choice)
            if not names:
                blocked.add(choice)
                continue
            _, _, index = heapq.heappop(self._queues[choice])
            self._count(choice, -1, now_ns)
            request = self._describer.describe(index)
            name = self._router.choose(request, names, self._loads(names))
            send(self._pool_of[name], name, request, now_ns)

    def _first_of(self, choice: PoolChoice) -> tuple[int, int, int]:
        return self._queues[choice][0]

    def _takers(self, choice: PoolChoice) -> Sequence[int]:
        """Return the replicas of pools that take one more request."""
        pools = [self.pools[place] for place in choice]
        if len(pools) == 1 and not self._max_outstanding:
            return pools[0].ready
        return [
            name
            for pool in pools
            for name in pool.ready
            if not self._max_outstanding
            or len(pool.replica_of(name).requests) < self._max_outstanding
        ]

    def _loads(self, names: Sequence[int]) -> Mapping[int, EngineLoad]:
        if not self.interval_ns:
            return self._live
        return {name: self._reported.get(name, _NO_LOAD) for name in names}

    def _count(self, choice: PoolChoice, change: int, now_ns: int) -> None:
        self.num_queued += change
        for place in choice:
            self.pools[place].usage.change(now_ns, queued=change)
