"""Prompts first, in batches of their own; where none can be computed, all that runs decodes.

A prompt gets all its blocks on admission, beside a watermark. When blocks run out, the latest
running request is preempted, by recompute or swap; what was swapped out comes back before anybody
new. Source: vLLM 0.6.6, core/scheduler.py without chunked prefill.
"""

from collections import deque

from foretoken.domain.engine import EngineProfile
from foretoken.simulator.serving.admission import (
    can_admit,
    continue_prompts,
    decode_running,
    find_uncached,
    fit_whole,
)
from foretoken.simulator.serving.batch import Batch, Queues, StepBudget
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.request import SimRequest

# Even a token that has room in its request's last block needs a free one.
_NUM_SPARE = 1


class VllmV0Scheduler:
    """vLLM V0's rules."""

    def __init__(self, rules: EngineProfile) -> None:
        self._rules = rules

    def select(
        self,
        running: list[SimRequest],
        waiting: deque[SimRequest],
        budget: StepBudget,
        kv: KvCache,
    ) -> Batch:
        """Return the next step's work."""
        batch, queues = Batch(budget, kv), Queues(running, waiting)
        if not continue_prompts(batch, queues):
            self._admit_prompts(batch, queues)
        if batch.is_empty:
            decode_running(batch, queues, _NUM_SPARE)
            self._swap_in(batch, queues)
        return batch

    def _admit_prompts(self, batch: Batch, queues: Queues) -> None:
        count, longest = 0, 0
        while can_admit(batch, queues) and not queues.waiting[0].is_swapped:
            request = queues.waiting[0]
            found, num_left = find_uncached(batch, request)
            longest = max(longest, num_left)
            if self._rules.counts_padding and count > 0:
                num_padded = (count + 1) * longest
                if num_padded > self._rules.max_num_batched_tokens:
                    return
            num_new = fit_whole(batch, num_left)
            num_held = request.num_tokens
            if num_new == 0 or not batch.can_fit(found, num_held, len(queues.running)):
                return
            batch.admit(queues, found, num_held, num_new)
            count += 1

    @staticmethod
    def _swap_in(batch: Batch, queues: Queues) -> None:
        while not batch.preempted and can_admit(batch, queues) and queues.waiting[0].is_swapped:
            request = queues.waiting[0]
            found, num_new = find_uncached(batch, request)
            if not batch.can_fit(found, request.num_tokens, len(queues.running)):
                return
            batch.admit(queues, found, request.num_tokens, num_new)


SCHEDULER = VllmV0Scheduler
