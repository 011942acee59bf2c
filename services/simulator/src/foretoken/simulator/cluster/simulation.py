"""Pools of replicas behind routers: what happens to each request of a plan, and when."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from foretoken.domain.requests.cluster import FailureSpec
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.cluster.encoding import Encoders
from foretoken.simulator.cluster.engine_pool import Ended, PoolRole
from foretoken.simulator.cluster.event_queue import EventKind, EventQueue
from foretoken.simulator.cluster.front_end import FrontEnds
from foretoken.simulator.cluster.gate import Gate, RequestDescriber
from foretoken.simulator.cluster.handover import Handover, Journey, Stage
from foretoken.simulator.cluster.pool_scaling import Outages, PoolScaling
from foretoken.simulator.cluster.pool_state import PoolState
from foretoken.simulator.cluster.routing import RoutedRequest
from foretoken.simulator.cluster.setup import ClusterSetup
from foretoken.simulator.engine.layout import NEVER_NS
from foretoken.simulator.engine.pool import EnginePool
from foretoken.simulator.serving.record import NOT_REACHED, RequestOutcome
from foretoken.simulator.workload.request_plan import (
    RequestPlan,
    find_first,
    find_sessions,
    find_waits,
)
from foretoken.simulator.workload.rng import named_stream


class Cluster:
    """Runs the requests of a plan through pools of engines until all are done.

    At an instant tokens leave first, then events happen in the order of their kinds and requests
    are routed, then engines schedule.
    """

    def __init__(
        self, plan: RequestPlan, setup: ClusterSetup, engines: Sequence[EnginePool]
    ) -> None:
        self._plan = plan
        self._failures = setup.failures or FailureSpec()
        self._events = EventQueue()
        sizes = [each.num_engines for each in engines]
        self.pools = [
            PoolState(each, pool, first, self._events, setup.seed)
            for each, pool, first in zip(
                engines, setup.pools, accumulate(sizes, initial=0), strict=False
            )
        ]
        # Each pool with the others.
        self._leads = [
            (lead, [pool for pool in self.pools if pool is not lead]) for lead in self.pools
        ]
        self._pool_of_engine = [
            pool for pool, size in zip(self.pools, sizes, strict=True) for _ in range(size)
        ]
        self.journeys = [
            Journey(index, priority) for index, priority in enumerate(plan.priority.tolist())
        ]
        self._num_tokens = (plan.num_prefill_tokens + plan.num_decode_tokens).tolist()
        self._max_queued = setup.routing.max_queued
        describer = RequestDescriber(plan)
        first = [pool for pool in self.pools if pool.setup.role is not PoolRole.DECODE]
        last = [pool for pool in self.pools if pool.setup.role is PoolRole.DECODE]
        num_front_ends = sum(each.setup.num_replicas_max for each in first)
        self._front_ends = FrontEnds(first[0].setup.engines.profile, num_front_ends)
        # What one router draws must tell nothing of what the other does.
        decode_seed = int(named_stream(setup.seed, "decode routing").integers(2**32))
        self._gate = Gate(setup.routing, first, describer, setup.seed)
        self.handover = Handover(
            setup,
            self._pool_of_engine.__getitem__,
            Gate(setup.decode_routing, last, describer, decode_seed),
            self.journeys,
            self._events,
        )
        self.encoders = Encoders(setup.encoders) if setup.encoders else None
        self._outages = Outages(setup.failures, self._events, self._retry, setup.seed)
        self._seed = setup.seed
        # When what was simulated ends, once it has begun.
        self.now_ns = NOT_REACHED
        self._num_expected = plan.num_requests
        self.num_done = 0
        # Those that wait for none of each session that a closed loop holds back, by session.
        self._held_back: deque[list[int]] = deque()
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        waits = find_waits(plan.follows, plan.joins)
        for after, before in zip(waits.after.tolist(), waits.before.tolist(), strict=True):
            self._followers[before].append(after)
        self._is_first = find_first(plan.follows, plan.joins).tolist()
        self._num_awaited = np.bincount(waits.after, minlength=plan.num_requests).tolist()
        self._session = find_sessions(plan.follows, plan.joins).tolist()
        self._session_left = Counter(self._session)

    def run(self, is_enough: Callable[[], bool]) -> None:
        """Simulate to the end, or until `is_enough`, which is asked after every instant.

        Called again it goes on.

        Raises:
            RuntimeError: requests wait that nothing will serve.

        """
        if self.now_ns == NOT_REACHED:
            self.now_ns = 0
            self._start()
        while True:
            is_done = self.num_done == self._num_expected
            horizon_ns = NEVER_NS if is_done else self._events.next_ns
            reached_ns, num_ended = self._advance(horizon_ns)
            if reached_ns == NEVER_NS:
                break
            if not num_ended:
                self._complete(reached_ns)
            self._settle(reached_ns)
            if not is_done:
                self.now_ns = reached_ns
            if is_enough():
                return
        if self.num_done < self._num_expected:
            raise RuntimeError("requests wait that nothing will serve")

    def send_no_more(self) -> None:
        """Let a closed loop end with the requests that have been sent."""
        for firsts in self._held_back:
            self._num_expected -= self._session_left[self._session[firsts[0]]]
        self._held_back.clear()

    def _start(self) -> None:
        for gate in (self._gate, self.handover.gate):
            self._report_loads(gate)
        self._outages.start(self.pools)
        for pool in self.pools:
            if spec := pool.setup.autoscaling:
                PoolScaling(pool, spec, self._events, self._outages, self._seed).start()
        self._send_first()

    def _report_loads(self, gate: Gate) -> None:
        """Let a router learn of loads at every multiple of its interval, if it has one."""

        def report(_: int, now_ns: int) -> None:
            gate.report_loads()
            self._events.push(now_ns + gate.interval_ns, EventKind.LOAD_REPORT, report)

        if gate.interval_ns and gate.pools:
            self._events.push(0, EventKind.LOAD_REPORT, report)

    def _advance(self, horizon_ns: int) -> tuple[int, int]:
        """Let pools go on by themselves; return the next instant, and how many requests ended.

        Those have been dealt with, and what else happens at that instant is yet to come.
        """
        while True:
            times_ns = [pool.engines.next_ns for pool in self.pools]
            next_ns = min(times_ns)
            if next_ns == NEVER_NS and not self._events.has_awaited:
                return NEVER_NS, 0
            if next_ns >= horizon_ns:
                return horizon_ns, 0
            lead, others = self._leads[times_ns.index(next_ns)]
            limit_ns = horizon_ns
            for pool in others:
                limit_ns = min(limit_ns, pool.engines.quiet_until(limit_ns))
            if next_ns >= limit_ns:
                return next_ns, 0
            reached_ns, ended = lead.engines.advance(limit_ns)
            for pool in others:
                pool.engines.advance(reached_ns)
            if ended:
                self._end_all(lead, ended, reached_ns)
                for pool in others:
                    self._end_all(pool, pool.engines.complete(reached_ns), reached_ns)
                return reached_ns, len(ended)

    def _complete(self, now_ns: int) -> None:
        for pool in self.pools:
            if pool.engines.next_ns == now_ns:
                self._end_all(pool, pool.engines.complete(now_ns), now_ns)

    def _settle(self, now_ns: int) -> None:
        """Let events happen, then route, then let engines schedule."""
        self._route(now_ns)
        if self.num_done < self._num_expected:
            while self._events.pop(now_ns):
                self._route(now_ns)
        for pool in self.pools:
            if pool.engines.next_ns == now_ns:
                self._end_all(pool, pool.engines.tick(now_ns), now_ns)

    def _route(self, now_ns: int) -> None:
        if self._gate.num_queued:
            self._gate.dispatch(now_ns, self._submit)
        if self.handover.gate.num_queued:
            self.handover.dispatch(now_ns)

    def _enter(self, index: int, now_ns: int) -> None:
        """Let a request arrive once its images are encoded, where that is done apart.

        Those of later turns of a conversation are known from its first prompt.
        """
        if self.encoders is None or not self._is_first[index]:
            self._arrive(index, now_ns)
            return
        self._events.push(self.encoders.take(now_ns), EventKind.ARRIVAL, self._arrive, index)

    def _arrive(self, index: int, now_ns: int) -> None:
        """Let a request find a replica, wait for one, or refuse it."""
        journey = self.journeys[index]
        decode = self.handover.gate
        if not self._gate.choices[index]:
            self._refuse(journey, self._gate, now_ns)
            return
        if decode.pools and not decode.choices[index] and self._plan.num_decode_tokens[index] > 1:
            self._refuse(journey, decode, now_ns)
            return
        journey.stage = Stage.AT_ROUTER
        self._gate.offer(index, journey.priority, now_ns)
        self._gate.dispatch(now_ns, self._submit)
        is_full = 0 < self._max_queued < self._gate.num_queued
        # One that has been on a replica has passed already.
        if is_full and journey.stage is Stage.AT_ROUTER and journey.try_number == 0:
            self._gate.withdraw(index, now_ns)
            self._end(journey, RequestOutcome.REJECTED, now_ns)

    def _refuse(self, journey: Journey, gate: Gate, now_ns: int) -> None:
        """End a request that no pool behind a gate can ever hold."""
        num_tokens = self._num_tokens[journey.index]
        is_within = any(num_tokens <= pool.setup.engines.max_context for pool in gate.pools)
        outcome = RequestOutcome.EXCEEDS_KV_CACHE if is_within else RequestOutcome.CONTEXT_TOO_LONG
        self._end(journey, outcome, now_ns)

    def _submit(self, pool: PoolState, name: int, request: RoutedRequest, now_ns: int) -> None:
        """Give a request to a replica that takes it."""
        journey = self.journeys[request.number]
        journey.stage = Stage.ON_ENGINE
        journey.first_engine = pool.put(name, request, now_ns)
        pool.submit(journey.first_engine, request, now_ns)

    def _end_all(self, pool: PoolState, ended: Sequence[Ended], now_ns: int) -> None:
        """Deal with requests that a pool is done with."""
        for index, outcome in ended:
            journey = self.journeys[index]
            is_complete = outcome is RequestOutcome.COMPLETED
            if pool.setup.role is not PoolRole.DECODE:
                journey.first_engine = pool.first_engine + pool.engines.engine_of(index)
            if pool.setup.role is PoolRole.PREFILL and is_complete:
                if self._plan.num_decode_tokens[index] > 1:
                    self.handover.offer(journey, now_ns)
                    continue
                self.handover.leave_prefill(journey, now_ns)
            elif pool.setup.role is PoolRole.DECODE:
                pool.take_off(journey.engine, index, now_ns)
                self.handover.use_room(journey.engine, now_ns)
            else:
                pool.take_off(journey.first_engine, index, now_ns)
            seen_ns = pool.engines.finished_ns(index) if is_complete else now_ns
            self._end(journey, outcome, seen_ns)

    def _retry(self, lost: Sequence[int], now_ns: int) -> None:
        """Let requests of a replica that failed begin anew, or be lost."""
        for index in lost:
            journey = self.journeys[index]
            if self.handover.gate.pools:
                self.handover.abandon(journey, now_ns)
            if journey.try_number == self._failures.max_retries:
                self._end(journey, RequestOutcome.LOST, now_ns)
                continue
            journey.try_number += 1
            journey.stage = Stage.AWAY
            retry_ns = now_ns + round(self._failures.retry_delay_s * NS_PER_S)
            self._events.push(retry_ns, EventKind.ARRIVAL, self._enter, index)

    def _send_first(self) -> None:
        """Send what arrives by itself; a closed loop holds the sessions back that come later."""
        firsts = [index for index, count in enumerate(self._num_awaited) if not count]
        if self._plan.concurrency == 0:
            for index in firsts:
                self._send(index, 0)
            return
        sessions: defaultdict[int, list[int]] = defaultdict(list)
        for index in firsts:
            sessions[self._session[index]].append(index)
        self._held_back.extend(sessions.values())
        for _ in range(min(self._plan.concurrency, len(self._held_back))):
            self._begin_session(None)

    def _begin_session(self, now_ns: int | None) -> None:
        """Begin the next session of a closed loop now, or when the plan says."""
        for index in self._held_back.popleft():
            session = self._session[index]
            begin_ns = int(self._plan.arrival_ns[session]) if now_ns is None else now_ns
            self._send(index, begin_ns + int(self._plan.think_ns[index]))

    def _send(self, index: int, now_ns: int) -> None:
        """Let a client send a request now, or at its earliest."""
        journey = self.journeys[index]
        journey.arrival_ns = max(now_ns, int(self._plan.arrival_ns[index]))
        self._events.push(journey.arrival_ns, EventKind.ARRIVAL, self._pass_front_end, index)

    def _pass_front_end(self, index: int, now_ns: int) -> None:
        """Let a request through the server in front of a replica."""
        num_serving = sum(len(pool.ready) for pool in self._gate.pools)
        num_tokens = int(self._plan.num_prefill_tokens[index])
        ready_ns = self._front_ends.take(num_tokens, num_serving, now_ns)
        if ready_ns > now_ns:
            self._events.push(ready_ns, EventKind.ARRIVAL, self._enter, index)
        else:
            self._enter(index, now_ns)

    def _end(self, journey: Journey, outcome: RequestOutcome, now_ns: int) -> None:
        """Send the requests that waited for this one last, or a closed loop's next session."""
        journey.stage, journey.outcome = Stage.AWAY, outcome
        self.num_done += 1
        for index in self._followers[journey.index]:
            self._num_awaited[index] -= 1
            if not self._num_awaited[index]:
                self._send(index, now_ns + int(self._plan.think_ns[index]))
        session = self._session[journey.index]
        self._session_left[session] -= 1
        if self._plan.concurrency > 0 and not self._session_left[session] and self._held_back:
            self._begin_session(now_ns)
