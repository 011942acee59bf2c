"""Replicas that fail, at random and as listed, and come back."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from foretoken.domain.requests.cluster import FailureSpec
from foretoken.domain.units import NS_PER_S
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
