"""Decoding requests first; the rest of a step of fixed size is filled with pieces of prompts.

A prompt gets all its blocks on admission, beside a watermark. When blocks run out, the latest
running request is preempted. Source: Agrawal et al., Sarathi-Serve, OSDI 2024, algorithm 3, and
microsoft/vidur, sarathi_replica_scheduler.py.
"""

from collections import deque

from foretoken.domain.engine import EngineProfile
from foretoken.simulator.serving.admission import (
    can_admit,
    continue_prompts,
    decode_running,
    find_uncached,
)
from foretoken.simulator.serving.batch import Batch, Queues, StepBudget
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.request import SimRequest

# Even a token that has room in its request's last block needs a free one.
_NUM_SPARE = 1


class SarathiScheduler:
    """Sarathi's rules."""

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
        decode_running(batch, queues, _NUM_SPARE)
        continue_prompts(batch, queues)
        while can_admit(batch, queues):
            request = waiting[0]
            found, num_left = find_uncached(batch, request)
            if not batch.can_fit(found, request.num_tokens, len(running)):
                break
            batch.admit(queues, found, request.num_tokens, batch.limit_piece(num_left))
        return batch


SCHEDULER = SarathiScheduler
