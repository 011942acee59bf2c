"""One serving copy of the model: queues, KV cache, and the steps in flight."""

from collections import deque
from typing import NamedTuple

from foretoken.domain.units import NS_PER_US
from foretoken.simulator.serving.batch import Batch, Scheduler, StepBudget, StepCost, StepShape
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.request import SimRequest
from foretoken.simulator.serving.step_log import StepLog


class ReplicaRules(NamedTuple):
    """What a replica is built from. `host_gap_ns` passes before every step.

    Requests of more than `max_context` tokens are refused. With `can_coast` the replica runs
    through steps in which the batch only grows without asking the scheduler again; the outcome is
    the same, only slower without.
    """

    scheduler: Scheduler
    budget: StepBudget
    max_context: int
    host_gap_ns: int = 0
    can_coast: bool = True


class Launch(NamedTuple):
    """A batch that was sent off: when its last step ends, when the first stage is free again."""

    done_ns: int
    stage_free_ns: int


class _InFlight(NamedTuple):
    batch: Batch
    first_step: int
    num_steps: int


class Replica:
    """Takes requests, launches batches, completes them in the order of launch.

    With one pipeline stage a batch runs alone. With more, a batch of other requests follows as
    soon as the first stage is free; every stage takes the batches in order, so latency is the sum
    over stages and throughput is set by the slowest.
    """

    def __init__(self, rules: ReplicaRules, cost: StepCost, kv: KvCache) -> None:
        self._rules = rules
        self._cost = cost
        self._stage_free_ns = [0] * cost.num_stages
        self._num_admitted = 0
        self.kv = kv
        self.log = StepLog()
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []  # without those in flight where there are stages
        self.in_flight: deque[_InFlight] = deque()

    def can_launch(self, now_ns: int) -> bool:
        """Whether the first stage is free and a request is there for another batch."""
        is_free = (
            len(self.in_flight) < len(self._stage_free_ns) and self._stage_free_ns[0] <= now_ns
        )
        return is_free and bool(self.running or self.waiting)

    @property
    def requests_in_flight(self) -> list[SimRequest]:
        """Requests of the batches that have left `running` for the pipeline."""
        if len(self._stage_free_ns) == 1:
            return []
        return [request for flight in self.in_flight for request in _requests_of(flight.batch)]

    def enqueue(self, request: SimRequest) -> bool:
        """Take a request; False refuses one that is too long for the model or the KV cache."""
        num_tokens = request.num_prefill_tokens + request.num_decode_tokens
        if num_tokens > self._rules.max_context or not self.kv.can_ever_hold(request):
            return False
        self.waiting.append(request)
        return True

    def launch(self, now_ns: int, horizon_ns: int) -> Launch | None:
        """Send off the next batch, or None when nothing can be scheduled now.

        `horizon_ns` is when something may happen that this replica does not know of.
        """
        batch = self._select()
        if batch.is_empty:
            return None
        for request, _ in batch.prefills:
            if request.scheduled_ns < 0:
                request.scheduled_ns = now_ns
        first_step = self.log.num_steps
        shape = _shape_of(batch)
        if self._is_steady(batch):
            count = self._coast(now_ns, horizon_ns, shape)
            launch = Launch(self.log.end_ns[-1], self.log.end_ns[-1])
        else:
            count = 1
            launch = self._pass_stages(now_ns, shape)
            self.log.end_ns.append(launch.done_ns)
            self.log.num_used_blocks.append(self.kv.num_used)
        self.log.add(shape, count)
        self.in_flight.append(_InFlight(batch, first_step, count))
        return launch

    def complete(self) -> list[SimRequest]:
        """Apply the oldest launched batch and return the requests it finished."""
        batch, first_step, count = self.in_flight.popleft()
        has_finished = False
        for request in batch.decodes:
            request.num_computed += count
            request.emit_tokens(first_step, count)
            if request.num_generated >= request.num_decode_tokens:
                has_finished = True
        for request, num_tokens in batch.prefills:
            request.compute(num_tokens, first_step)
            has_finished = has_finished or request.is_finished
        if len(self._stage_free_ns) > 1:
            self.running.extend(_requests_of(batch))
            self.running.sort(key=_order_of)
        if not has_finished:
            return []
        return self._retire()

    def _select(self) -> Batch:
        rules = self._rules
        num_in_flight = len(self.requests_in_flight)
        num_seqs = rules.budget.num_seqs - num_in_flight
        budget = StepBudget(rules.budget.num_tokens, num_seqs, num_in_flight)
        batch = rules.scheduler.select(self.running, self.waiting, budget, self.kv)
        if batch.is_empty and batch.preempted:
            # The preempted gave back what others, or they themselves, can now use.
            batch = rules.scheduler.select(self.running, self.waiting, budget, self.kv)
        for request, _ in batch.prefills:
            if request.num_computed == 0:
                self._num_admitted += 1
                request.order = self._num_admitted
        if len(self._stage_free_ns) > 1:
            scheduled = {request.index for request in _requests_of(batch)}
            self.running = [r for r in self.running if r.index not in scheduled]
        return batch

    def _is_steady(self, batch: Batch) -> bool:
        return (
            self._rules.can_coast
            and len(self._stage_free_ns) == 1
            and len(batch.decodes) == len(self.running)
            and not batch.preempted
        )

    def _coast(self, now_ns: int, horizon_ns: int, shape: StepShape) -> int:
        """Run decoding steps until one finishes, blocks run out or the horizon; return how many.

        A step that has begun before the horizon ends after it.
        """
        kv, num_decodes, requests = self.kv, shape.num_decodes, self.running
        kv_tokens, kv_tokens_max = shape.decode_kv_tokens, shape.decode_kv_tokens_max
        # How many requests need another block, by the step (modulo the block size) they do.
        growing = [0] * kv.block_size
        for request in requests:
            growing[-request.num_computed % kv.block_size] += 1
        limit = min(request.num_decode_tokens - request.num_generated for request in requests)
        ends, used = self.log.end_ns, self.log.num_used_blocks
        decode_us, host_gap_ns, num_free = (
            self._cost.decode_us,
            self._rules.host_gap_ns,
            kv.num_free,
        )
        count = 0
        while True:
            now_ns += host_gap_ns
            now_ns += round(decode_us(num_decodes, kv_tokens, kv_tokens_max) * NS_PER_US)
            ends.append(now_ns)
            used.append(kv.num_blocks - num_free)
            count += 1
            if count == limit or now_ns >= horizon_ns:
                break
            num_needed = growing[count % kv.block_size]
            if num_needed > num_free:
                break
            num_free -= num_needed
            kv_tokens += num_decodes
            kv_tokens_max += 1
        for request in requests:
            # The first step's block was allocated by the scheduler, the others fit as counted.
            kv.allocate(request, count)
        self._stage_free_ns[0] = now_ns
        return count

    def _pass_stages(self, now_ns: int, shape: StepShape) -> Launch:
        free_ns = self._stage_free_ns
        ready_ns = now_ns + self._rules.host_gap_ns
        for stage, stage_us in enumerate(self._cost.stage_us(shape)):
            ready_ns = max(ready_ns, free_ns[stage]) + round(stage_us * NS_PER_US)
            free_ns[stage] = ready_ns
        return Launch(ready_ns, free_ns[0])

    def _retire(self) -> list[SimRequest]:
        finished = [request for request in self.running if request.is_finished]
        self.running = [request for request in self.running if not request.is_finished]
        for request in finished:
            self.kv.free(request)
        return finished


def _requests_of(batch: Batch) -> list[SimRequest]:
    return [*batch.decodes, *(request for request, _ in batch.prefills)]


def _order_of(request: SimRequest) -> int:
    return request.order


def _shape_of(batch: Batch) -> StepShape:
    contexts = [request.num_computed + 1 for request in batch.decodes]
    num_completing = sum(
        num_tokens == request.num_uncomputed for request, num_tokens in batch.prefills
    )
    return StepShape(
        num_tokens=batch.num_tokens,
        num_rows=len(contexts) + num_completing,
        num_decodes=len(contexts),
        decode_kv_tokens=sum(contexts),
        decode_kv_tokens_max=max(contexts, default=0),
        prefills=tuple((n, request.num_computed) for request, n in batch.prefills),
    )
