"""Engines that run together, one alone or several in lock step: their loop, stages and clock."""

import enum
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from foretoken.domain.engine import EngineProfile
from foretoken.domain.units import NS_PER_US
from foretoken.simulator.serving.batch import Batch
from foretoken.simulator.serving.record import RequestOutcome
from foretoken.simulator.serving.replica import Replica, Step
from foretoken.simulator.serving.request import SimRequest

# Later than any instant of a simulation.
NEVER_NS = 2**62


class StepCost(Protocol):
    """How long a step takes on each pipeline stage."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages of an engine."""

    def stage_us(self, batch: Batch) -> Sequence[float]:
        """Return the time of a step on each stage, in µs."""

    def shared_us(self, stage: int, num_tokens: int, num_seqs: int) -> float:
        """Return what engines in lock step take together, by tokens and requests of all, in µs."""


class Turn(enum.Enum):
    """What a group waits for."""

    IDLE = "a request, or blocks from a tier"
    TURN = "its turn"
    COMPLETE = "the oldest batch in flight"


class _Flight(NamedTuple):
    steps: list[Step]
    scheduled_ns: int
    start_ns: int
    end_ns: int


class ReplicaGroup:
    """The loop of one engine, or of several in lock step, on one host thread.

    A turn schedules a batch where fewer than `depth` are in flight, else it waits for the oldest.
    Every stage takes the batches in order, so latency is the sum over stages and throughput is set
    by the slowest. In lock step all schedule together and the slowest sets the pace.
    """

    def __init__(self, rules: EngineProfile, replicas: Sequence[Replica], cost: StepCost) -> None:
        self._rules = rules
        self._cost = cost
        self._stage_free_ns = [0] * cost.num_stages
        self._host_free_ns = 0
        self._depth = cost.num_stages
        if cost.num_stages == 1 and rules.has_async_scheduling:
            self._depth = 2
        self._flights: deque[_Flight] = deque()
        self.replicas = replicas
        self.next_ns = NEVER_NS
        self.turn_kind = Turn.IDLE

    def wake(self, now_ns: int) -> None:
        """Let an idle group turn, as a request has arrived; it need not wait for a tier."""
        if self.turn_kind is Turn.IDLE:
            self.turn_kind = Turn.TURN
            self.next_ns = now_ns

    def turn(self) -> list[SimRequest]:
        """Schedule if possible, else wait; return requests for which there will never be room.

        Raises:
            RuntimeError: requests run that the scheduler does not schedule.

        """
        now_ns = self.next_ns
        for replica in self.replicas:
            replica.take_in(now_ns)
        if len(self._flights) < self._depth:
            batches = [replica.choose(now_ns) for replica in self.replicas]
            if any(not batch.is_empty for batch in batches):
                self._launch(batches, now_ns)
                self.turn_kind = Turn.TURN
                self.next_ns = self._host_free_ns
                return []
        if self._flights:
            self.turn_kind = Turn.COMPLETE
            self.next_ns = self._leaving_ns()
            return []
        return self._rest(now_ns)

    def complete(self) -> list[SimRequest]:
        """Let the tokens of the oldest batch leave; return the requests that are finished."""
        now_ns = self._host_free_ns = self.next_ns
        flight = self._flights.popleft()
        finished = []
        for replica, step in zip(self.replicas, flight.steps, strict=True):
            times_ns = (flight.scheduled_ns, flight.start_ns, now_ns)
            finished += replica.complete(step, times_ns)
        self.turn_kind = Turn.TURN
        return finished

    def clear(self) -> list[SimRequest]:
        """Lose everything but the finished steps; return the requests that had not ended."""
        lost = {
            request.index: request
            for replica in self.replicas
            for queue in (replica.arrived, replica.landed, replica.waiting, replica.running)
            for request in queue
        }
        for flight in self._flights:
            # A preempted one whose last token is on its way is in no queue.
            rows = [request for step in flight.steps for request in step.batch.rows]
            lost |= {request.index: request for request in rows}
        for replica in self.replicas:
            replica.clear()
        self._flights.clear()
        self._stage_free_ns = [0] * self._cost.num_stages
        self._host_free_ns = 0
        self.turn_kind = Turn.IDLE
        self.next_ns = NEVER_NS
        return [lost[index] for index in sorted(lost)]

    def _launch(self, batches: Sequence[Batch], now_ns: int) -> None:
        """Send the batches through the stages."""
        rules = self._rules
        steps = [
            replica.launch(batch) for replica, batch in zip(self.replicas, batches, strict=True)
        ]
        num_seqs = max(batch.num_seqs for batch in batches)
        num_tokens = sum(batch.num_tokens for batch in batches)
        total_seqs = sum(batch.num_seqs for batch in batches)
        ready_ns = now_ns + to_ns(rules.host_us + rules.host_us_per_seq * num_seqs)
        self._host_free_ns = ready_ns
        start_ns = max(ready_ns, self._stage_free_ns[0])
        times_us = [self._cost.stage_us(batch) for batch in batches]
        for stage in range(self._cost.num_stages):
            stage_us = max(time_us[stage] for time_us in times_us)
            stage_us += self._cost.shared_us(stage, num_tokens, total_seqs)
            ready_ns = max(ready_ns, self._stage_free_ns[stage]) + to_ns(stage_us)
            self._stage_free_ns[stage] = ready_ns
        self._flights.append(_Flight(steps, now_ns, start_ns, ready_ns))

    def _leaving_ns(self) -> int:
        """Return when the tokens of the oldest batch leave."""
        rules, flight = self._rules, self._flights[0]
        num_seqs = max(len(step.batch.rows) for step in flight.steps)
        output_ns = to_ns(rules.output_us + rules.output_us_per_seq * num_seqs)
        return max(flight.end_ns, self._host_free_ns) + output_ns

    def _rest(self, now_ns: int) -> list[SimRequest]:
        """Wait for a request or a tier; one that waits where no block is used will never fit."""
        loaded = [replica.next_loaded_ns(now_ns) for replica in self.replicas]
        self.turn_kind = Turn.IDLE
        self.next_ns = NEVER_NS
        for replica in self.replicas:
            if replica.running and not any(loaded):
                raise RuntimeError(f"{self._rules.scheduler} does not schedule what runs")
            if replica.waiting and not any(loaded) and replica.kv.num_used == 0:
                self.turn_kind = Turn.TURN
                self.next_ns = now_ns
                refused = replica.waiting.popleft()
                refused.outcome = RequestOutcome.EXCEEDS_KV_CACHE
                return [refused]
        if any(loaded):
            self.next_ns = min(time_ns for time_ns in loaded if time_ns is not None)
        return []


def to_ns(time_us: float) -> int:
    """Return a time in whole ns."""
    return round(float(time_us) * NS_PER_US)
