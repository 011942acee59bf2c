"""Decoding requests and whole prompts in one batch, chosen anew for every step.

A request is admitted when room for its prompt and its answer is free, which it gets at once: nobody
is preempted. Source: Yu et al., Orca, OSDI 2022, algorithm 1.
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


class OrcaScheduler:
    """Orca's rules."""

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
        decode_running(batch, queues)
        continue_prompts(batch, queues)
        while can_admit(batch, queues):
            request = waiting[0]
            found, num_left = find_uncached(batch, request)
            num_new, num_held = fit_whole(batch, num_left), request.num_kv_tokens_max
            if num_new == 0 or not batch.can_fit(found, num_held, len(running)):
                break
            batch.admit(queues, found, num_held, num_new)
        return batch


SCHEDULER = OrcaScheduler
