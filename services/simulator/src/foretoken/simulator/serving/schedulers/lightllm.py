"""Prompts in batches of their own, admitted against the most tokens that will ever be held at once.

Waiting requests are looked at when nothing runs and every `max_decode_run` steps of decoding. When
blocks run out all the same, the latest running request is preempted. Source: ModelTC/lightllm,
server/router/req_queue/continues_batch/impl.py and manager.py.
"""

from collections import deque
from collections.abc import Iterable

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


class LightllmScheduler:
    """LightLLM's rules."""

    def __init__(self, rules: EngineProfile) -> None:
        self._max_decode_run = rules.max_decode_run
        self._first_decode_step = 0  # after the last prompts

    def select(
        self,
        running: list[SimRequest],
        waiting: deque[SimRequest],
        budget: StepBudget,
        kv: KvCache,
    ) -> Batch:
        """Return the next step's work."""
        batch, queues = Batch(budget, kv), Queues(running, waiting)
        if not continue_prompts(batch, queues) and (not running or self._looks_at(budget.step)):
            self._admit_prompts(batch, queues)
        if batch.is_empty:
            decode_running(batch, queues)
        else:
            self._first_decode_step = budget.step + 1
        return batch

    def _looks_at(self, step: int) -> bool:
        run = step - self._first_decode_step
        return self._max_decode_run == 0 or (run > 0 and run % self._max_decode_run == 0)

    @staticmethod
    def _admit_prompts(batch: Batch, queues: Queues) -> None:
        num_tokens = batch.kv.num_blocks * batch.kv.block_size
        while can_admit(batch, queues):
            request = queues.waiting[0]
            found, num_left = find_uncached(batch, request)
            num_new, num_held = fit_whole(batch, num_left), request.num_tokens
            if num_new == 0 or not batch.can_fit(found, num_held, len(queues.running)):
                return
            uses = [_use_of(r, max(r.num_generated, 1)) for r in queues.running]
            uses.append(_use_of(request, request.num_generated + 1))
            if queues.running and _peak_tokens(uses) >= num_tokens:
                return
            batch.admit(queues, found, num_held, num_new)


def _use_of(request: SimRequest, num_generated: int) -> tuple[int, int]:
    """Return how many tokens a request holds once it decodes, and how many are to come."""
    num_left = max(request.num_decode_tokens - num_generated - 1, 0)
    return request.num_prefill_tokens + num_generated, num_left


def _peak_tokens(uses: Iterable[tuple[int, int]]) -> int:
    """Return the most tokens that requests will hold at once.

    They leave in the order of what they have left; all that remain grow until then.
    """
    total, peak = 0, 0
    for count, (held, left) in enumerate(sorted(uses, key=lambda use: -use[1]), 1):
        total += held
        peak = max(peak, left * count + total)
    return peak


SCHEDULER = LightllmScheduler
