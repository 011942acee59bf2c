"""One engine: its requests, its KV cache, and the steps it has done."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from foretoken.domain.engine import EngineProfile
from foretoken.simulator.cost_tables import StepShape
from foretoken.simulator.serving.batch import Batch, Scheduler, StepBudget
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.record import RequestOutcome
from foretoken.simulator.serving.request import SimRequest


class Step(NamedTuple):
    """A step of an engine, as it was when its batch had been chosen."""

    batch: Batch
    shape: StepShape
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_preempted: int


class Replica:
    """Takes requests, chooses batches, lets tokens leave; time is its group's business.

    A request whose prompt was computed elsewhere has `landed` with its blocks until there is a
    seat. With `keeps_blocks` those of a finished request stay until they are released.
    """

    def __init__(
        self,
        rules: EngineProfile,
        make_parts: Callable[[], tuple[Scheduler, KvCache]],
        num_stages: int,
        *,
        keeps_blocks: bool = False,
    ) -> None:
        self._rules = rules
        self._num_stages = num_stages
        self._make_parts = make_parts
        self._keeps_blocks = keeps_blocks
        self._scheduler, self.kv = make_parts()
        self._num_preempted = 0
        self._num_launched = 0
        self.arrived: deque[SimRequest] = deque()
        self.landed: deque[SimRequest] = deque()
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []
        # (step, when it was scheduled, started on the first stage and ended)
        self.steps: list[tuple[Step, int, int, int]] = []

    def take_in(self, now_ns: int) -> None:
        """Let the requests that have arrived wait, and those that have landed run."""
        while self.arrived:
            request = self.arrived.popleft()
            request.queued_ns = now_ns
            (self.landed if request.num_computed else self.waiting).append(request)
        if self._rules.has_priority_scheduling:
            ranked = sorted(self.waiting, key=lambda request: (-request.priority, request.index))
            self.waiting = deque(ranked)
        self._seat_landed()

    def clear(self) -> None:
        """Lose all requests, blocks and what the scheduler knows; the finished steps stay."""
        self._scheduler, self.kv = self._make_parts()
        self._num_preempted = 0
        self._num_launched = len(self.steps)
        self.running = []
        for queue in (self.arrived, self.landed, self.waiting):
            queue.clear()

    def choose(self, now_ns: int) -> Batch:
        """Return what the scheduler wants to do next."""
        budget = StepBudget(self._rules, self._num_launched, now_ns)
        batch = self._scheduler.select(self.running, self.waiting, budget, self.kv)
        self._num_preempted += len(batch.preempted)
        if batch.is_empty and batch.preempted:
            # The preempted gave back what others, or they themselves, can now use.
            self._seat_landed()
            batch = self._scheduler.select(self.running, self.waiting, budget, self.kv)
            self._num_preempted += len(batch.preempted)
        return batch

    def launch(self, batch: Batch) -> Step:
        """Note that a batch is on its way."""
        num_preempted, self._num_preempted = self._num_preempted, 0
        self._num_launched += 1
        return Step(
            batch,
            batch.shape,
            len(self.running),
            len(self.waiting),
            self.kv.num_used,
            num_preempted,
        )

    def complete(self, step: Step, times_ns: tuple[int, int, int]) -> list[SimRequest]:
        """Let the tokens of a step leave and return the requests that are finished."""
        now_ns = times_ns[2]
        finished = []
        for request, count in zip(step.batch.rows, step.batch.yields, strict=True):
            request.emit_tokens(len(self.steps), now_ns, self._num_stages, count)
            if request.is_finished:
                request.finished_ns = now_ns
                request.outcome = RequestOutcome.COMPLETED
                if not self._keeps_blocks:
                    self.kv.free(request)
                finished.append(request)
        if finished:
            self.running = [request for request in self.running if not request.is_finished]
        self.steps.append((step, *times_ns))
        return finished

    def next_loaded_ns(self, now_ns: int) -> int | None:
        """Return when the next running request that waits for a tier may go on."""
        later = [r.loaded_ns for r in self.running if r.loaded_ns > now_ns]
        return min(later, default=None)

    def _seat_landed(self) -> None:
        while self.landed and len(self.running) < self._rules.max_num_seqs:
            self.running.append(self.landed.popleft())
