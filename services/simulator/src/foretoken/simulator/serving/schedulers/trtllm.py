"""In-flight batching that never evicts: decoding requests first, then prompts in order.

A request is admitted when all blocks it will ever need are free beside what others may still take;
it gets them at once. A prompt is computed as a whole, or with `max_chunk_tokens` in pieces. Source:
TensorRT-LLM 1.x, GUARANTEED_NO_EVICT and the micro-batch scheduler of _torch/pyexecutor/scheduler.
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


class TrtllmScheduler:
    """TensorRT-LLM's default rules."""

    def __init__(self, rules: EngineProfile) -> None:
        self._splits_prompts = rules.max_chunk_tokens > 0

    def select(
        self,
        running: list[SimRequest],
        waiting: deque[SimRequest],
        budget: StepBudget,
        kv: KvCache,
    ) -> Batch:
        """Return the next step's work."""
        batch, queues = Batch(budget, kv), Queues(running, waiting)
        decode_running(batch, queues)
        continue_prompts(batch, queues)
        while can_admit(batch, queues) and batch.can_prefill:
            request = waiting[0]
            found, num_left = find_uncached(batch, request)
            num_new, num_held = self._limit(batch, num_left), request.num_kv_tokens_max
            if num_new == 0 or not batch.can_fit(found, num_held, len(running)):
                break
            batch.admit(queues, found, num_held, num_new)
        return batch

    def _limit(self, batch: Batch, num_tokens: int) -> int:
        return (
            batch.limit_piece(num_tokens) if self._splits_prompts else fit_whole(batch, num_tokens)
        )


SCHEDULER = TrtllmScheduler
