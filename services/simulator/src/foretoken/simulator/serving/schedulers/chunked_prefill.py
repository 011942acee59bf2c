"""Continuous batching with chunked prefill: running requests first, then waiting ones in order.

All share one budget of tokens per step, so a long prompt is computed over several steps beside
the decoding requests. When blocks run out, the latest-arrived running request is preempted and
computes everything again. Source: vLLM v1's default scheduler.
"""

from collections import deque

from foretoken.simulator.serving.batch import Batch, StepBudget
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.request import SimRequest


class ChunkedPrefillScheduler:
    """vLLM v1's rules without prefix sharing."""

    def select(
        self,
        running: list[SimRequest],
        waiting: deque[SimRequest],
        budget: StepBudget,
        kv: KvCache,
    ) -> Batch:
        """Return the next step's work."""
        batch = Batch()
        if self._extend_running(batch, running, budget, kv):
            self._admit_waiting(batch, running, waiting, budget, kv)
        # Where blocks are short nobody new comes in, and the preempted wait in front.
        waiting.extendleft(batch.preempted)
        return batch

    def _extend_running(
        self, batch: Batch, running: list[SimRequest], budget: StepBudget, kv: KvCache
    ) -> bool:
        """Schedule running requests; False when blocks were short."""
        index = 0
        while index < len(running) and batch.num_tokens < budget.num_tokens:
            request = running[index]
            num_new = request.num_uncomputed
            if num_new > 1:
                num_new = min(num_new, budget.num_tokens - batch.num_tokens)
            needs_block = request.num_computed + num_new > request.num_slots
            while needs_block and not kv.allocate(request, num_new):
                if running[-1] is request and budget.num_in_flight:
                    return False  # a later one may be in flight; it will come back as a victim
                victim = running.pop()
                batch.preempt(victim, kv)
                if victim is request:
                    return False
            batch.add(request, num_new)
            index += 1
        return not batch.preempted

    def _admit_waiting(
        self,
        batch: Batch,
        running: list[SimRequest],
        waiting: deque[SimRequest],
        budget: StepBudget,
        kv: KvCache,
    ) -> None:
        while waiting and len(running) < budget.num_seqs and batch.num_tokens < budget.num_tokens:
            request = waiting[0]
            num_new = min(request.num_uncomputed, budget.num_tokens - batch.num_tokens)
            if not kv.allocate(request, num_new):
                return
            running.append(waiting.popleft())
            batch.add(request, num_new)


SCHEDULER = ChunkedPrefillScheduler()
