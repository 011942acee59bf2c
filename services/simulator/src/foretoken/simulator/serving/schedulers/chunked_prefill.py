"""Continuous batching with chunked prefill: running requests first, then waiting ones in order.

All share one budget of tokens per step, so a long prompt is computed over several steps beside
the decoding requests. When blocks run out, the latest running request is preempted. Source: vLLM
v1's default scheduler.
"""

from collections import deque

from foretoken.domain.engine import EngineProfile
from foretoken.simulator.serving.batch import Batch, Queues, StepBudget
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.request import SimRequest


class ChunkedPrefillScheduler:
    """vLLM v1's rules."""

    def __init__(self, rules: EngineProfile) -> None:
        self._max_num_seqs = rules.max_num_seqs

    def select(
        self,
        running: list[SimRequest],
        waiting: deque[SimRequest],
        budget: StepBudget,
        kv: KvCache,
    ) -> Batch:
        """Return the next step's work."""
        batch, queues = Batch(budget, kv), Queues(running, waiting)
        self._extend_running(batch, queues)
        while (
            waiting
            and not batch.preempted  # where blocks are short nobody new comes in
            and len(running) < self._max_num_seqs
            and batch.num_tokens_left > 0
            and batch.can_prefill
            and batch.admit_first(queues)
        ):
            pass
        return batch

    def _extend_running(self, batch: Batch, queues: Queues) -> None:
        index = 0
        while index < len(queues.running) and batch.num_tokens_left > 0:
            request = queues.running[index]
            index += 1
            if not batch.can_schedule(request):
                continue
            if request.num_uncomputed > 1:
                if not batch.can_prefill:
                    continue
                num_new = batch.limit_piece(request.num_uncomputed)
                num_held = request.num_computed + num_new
            else:
                num_new = min(1 + request.num_draft, batch.num_tokens_left)
                num_held = request.num_kv_tokens_next
            while not batch.kv.allocate(request, num_held, batch.budget.now_ns):
                if batch.preempt(queues, -1) is request:
                    return
            batch.schedule(request, num_new)


SCHEDULER = ChunkedPrefillScheduler
