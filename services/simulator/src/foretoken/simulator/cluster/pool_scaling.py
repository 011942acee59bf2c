"""How many of a pool's replicas serve: autoscaling, cold starts, failures."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from foretoken.domain.requests.cluster import AutoscalingSpec, FailureSpec
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.cluster.autoscaling import PoolObservation, find_autoscaler
from foretoken.simulator.cluster.event_queue import EventKind, EventQueue
from foretoken.simulator.cluster.pool_state import Phase, PoolState
from foretoken.simulator.workload.rng import named_stream


class Outages:
    """Lets replicas begin to serve, fail and restart.

    At random a replica fails after an exponential time of serving, drawn from a stream of its own.
    """

    def __init__(
        self,
        spec: FailureSpec | None,
        events: EventQueue,
        lose: Callable[[Sequence[int], int], None],
        seed: int,
    ) -> None:
        self._spec = spec or FailureSpec()
        self._events = events
        self._lose = lose
        self._seed = seed
        self._streams: dict[tuple[str, int], np.random.Generator] = {}

    def start(self, pools: Sequence[PoolState]) -> None:
        """Let the first replicas serve, and plan the listed outages."""
        for pool in pools:
            for number in range(pool.setup.num_replicas):
                self._serve(pool, number, 0)
        by_name = {pool.setup.name: pool for pool in pools}
        for outage in self._spec.outages:
            pool = by_name[outage.pool]
            if outage.replica < len(pool.replicas):
                fail = partial(self._fail, pool, outage.replica, round(outage.restart_s * NS_PER_S))
                self._events.push(round(outage.start_s * NS_PER_S), EventKind.FAILURE, fail)

    def be_ready_at(self, pool: PoolState, number: int, time_ns: int) -> None:
        """Let a replica serve from some time on, unless its phase ends before."""
        phase_number = pool.replicas[number].phase_number

        def be_ready(_: int, now_ns: int) -> None:
            if pool.replicas[number].phase_number == phase_number:
                self._serve(pool, number, now_ns)

        self._events.push(time_ns, EventKind.READY, be_ready)

    def _serve(self, pool: PoolState, number: int, now_ns: int) -> None:
        pool.replicas[number].life += 1
        pool.enter(number, Phase.READY, now_ns)
        if not self._spec.mtbf_s:
            return
        key = (pool.setup.name, number)
        if key not in self._streams:
            self._streams[key] = named_stream(self._seed, f"failures of {key[0]} {number}")
        uptime_s = self._streams[key].exponential(self._spec.mtbf_s)
        life = pool.replicas[number].life

        def fail(event: int, then_ns: int) -> None:
            if pool.replicas[number].life == life:
                self._fail(pool, number, round(self._spec.restart_s * NS_PER_S), event, then_ns)

        self._events.push(now_ns + round(uptime_s * NS_PER_S), EventKind.FAILURE, fail)

    def _fail(self, pool: PoolState, number: int, restart_ns: int, _: int, now_ns: int) -> None:
        """Let a replica lose all it has; one that was to go does not come back."""
        phase = pool.replicas[number].phase
        if phase in (Phase.OFF, Phase.DOWN):
            return
        pool.num_failures += 1
        pool.replicas[number].life += 1
        lost = pool.empty(number, now_ns)
        if phase is Phase.DRAINING:
            pool.enter(number, Phase.OFF, now_ns)
        else:
            pool.enter(number, Phase.DOWN, now_ns)
            self.be_ready_at(pool, number, now_ns + restart_ns)
        self._lose(lost, now_ns)


# Replicas that serve or will.
_COUNTED = (Phase.READY, Phase.STARTING, Phase.DOWN)
# Given up in this order.
_LEAST_NEEDED = (Phase.STARTING, Phase.DOWN, Phase.READY)


class PoolScaling:
    """Queries a pool's autoscaler at every interval and does what it wants."""

    def __init__(
        self,
        pool: PoolState,
        spec: AutoscalingSpec,
        events: EventQueue,
        outages: Outages,
        seed: int,
    ) -> None:
        self._pool = pool
        self._spec = spec
        self._events = events
        self._outages = outages
        self._policy = find_autoscaler(spec.policy)(spec.options, seed)
        self._interval_ns = round(spec.interval_s * NS_PER_S)
        self._cold_start_ns = round(spec.cold_start_s * NS_PER_S)

    def start(self) -> None:
        """Decide for the first time after an interval."""
        self._events.push(self._interval_ns, EventKind.SCALING, self._decide)

    def _decide(self, _: int, now_ns: int) -> None:
        wanted = self._policy.decide(self._observe(now_ns))
        most = min(self._spec.max_replicas, len(self._pool.replicas))
        wanted = max(self._spec.min_replicas, min(wanted, most))
        change = wanted - len(self._pool.numbers_of(*_COUNTED))
        for _i in range(change):
            self._add(now_ns)
        for _i in range(-change):
            self._give_up(now_ns)
        self._events.push(now_ns + self._interval_ns, EventKind.SCALING, self._decide)

    def _observe(self, now_ns: int) -> PoolObservation:
        pool = self._pool
        loads = [pool.replica_load(name) for name in pool.ready]
        usage = pool.usage
        num_arrivals = usage.num_arrivals
        return PoolObservation(
            now_s=now_ns / NS_PER_S,
            interval_s=self._spec.interval_s,
            num_running=len(loads),
            num_starting=len(pool.numbers_of(Phase.STARTING, Phase.DOWN)),
            num_waiting_requests=usage.num_queued + sum(load.num_waiting for load in loads),
            num_running_requests=sum(load.num_running for load in loads),
            kv_utilization_ratio=sum(load.kv_utilization_ratio for load in loads)
            / max(len(loads), 1),
            num_arrivals=num_arrivals,
            mean_outstanding=usage.take_mean(now_ns),
        )

    def _add(self, now_ns: int) -> None:
        """Keep a replica that was to go, or start one."""
        pool = self._pool
        pool.num_scale_ups += 1
        if draining := pool.numbers_of(Phase.DRAINING):
            pool.enter(draining[0], Phase.READY, now_ns)
            return
        number = pool.numbers_of(Phase.OFF)[0]
        pool.enter(number, Phase.STARTING, now_ns)
        self._outages.be_ready_at(pool, number, now_ns + self._cold_start_ns)

    def _give_up(self, now_ns: int) -> None:
        """Stop a replica that does not serve, else let that with the fewest requests drain."""
        pool = self._pool
        pool.num_scale_downs += 1
        phase = next(phase for phase in _LEAST_NEEDED if pool.numbers_of(phase))
        numbers = pool.numbers_of(phase)
        number = min(numbers, key=lambda place: (len(pool.replicas[place].requests), -place))
        if pool.replicas[number].requests:
            pool.enter(number, Phase.DRAINING, now_ns)
        else:
            pool.stop(number, now_ns)
