"""Static batching: a batch runs until all its requests are complete, then the next one begins.

With `counts_padding` each request of a batch takes as much of the KV cache and of the step as the
longest. Source: Yu et al., Orca, OSDI 2022, section 3, on FasterTransformer; its ParallelGpt.cc
allocates the cache for the longest sequence of the batch.
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


class StaticBatchScheduler:
    """FasterTransformer's rules."""

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
        if running:
            decode_running(batch, queues)
            continue_prompts(batch, queues)
        else:
            self._begin_batch(batch, queues)
        return batch

    def _begin_batch(self, batch: Batch, queues: Queues) -> None:
        count, longest_prompt, longest, num_room = 0, 0, 0, batch.kv.num_free
        while can_admit(batch, queues):
            request = queues.waiting[0]
            found, num_left = find_uncached(batch, request)
            num_held = request.num_kv_tokens_max
            longest_prompt = max(longest_prompt, num_left)
            longest = max(longest, batch.kv.blocks_for(num_held))
            if self._rules.counts_padding and count > 0:
                num_padded = (count + 1) * longest_prompt
                if num_padded > self._rules.max_num_batched_tokens:
                    return
                if (count + 1) * longest > num_room:
                    return
            num_new = fit_whole(batch, num_left)
            if num_new == 0 or not batch.can_fit(found, num_held, len(queues.running)):
                return
            batch.admit(queues, found, num_held, num_new)
            count += 1


SCHEDULER = StaticBatchScheduler
