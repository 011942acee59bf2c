"""Prompts first, in batches of their own, admitted against a share of the answers still to come.

With `mixes_prefill` all that runs decodes in those batches too, and prompts have what it leaves.

The share falls while all goes well; when blocks run out, the requests with the shortest answers so
far are taken back to the end of the queue, and the share is set anew from what was generated. Once
a request did not fit nobody is admitted until one has left. The last prompt of a batch is cut at
the budget and goes on in the next step. Source: SGLang 0.5.9, srt/managers/schedule_policy.py,
scheduler.py and schedule_batch.py.
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

# Of an answer, as much as this is looked at when its request is admitted; the share that is kept
# free at first, in the end, and the decode steps in between; and for how many steps what stays is
# to have room after a retraction. Source: SGLang 0.5.9, srt/environ.py (the least share is 0.14 of
# the first).
MOST_ANSWER_TOKENS = 4096
FIRST_SHARE, LEAST_SHARE, SHARE_STEPS = 0.7, 0.7 * 0.14, 600
RETRACT_STEPS = 20
_DECAY = (FIRST_SHARE - LEAST_SHARE) / SHARE_STEPS


class SglangScheduler:
    """SGLang's rules with a radix cache."""

    def __init__(self, rules: EngineProfile) -> None:
        self._rules = rules
        self._share_change = 0.0  # what the share was last set to, less the first
        self._share_step = 0  # from which it falls, prompts' steps left out
        self._num_full = 0  # how many ran when no more could be admitted

    def select(
        self,
        running: list[SimRequest],
        waiting: deque[SimRequest],
        budget: StepBudget,
        kv: KvCache,
    ) -> Batch:
        """Return the next step's work."""
        batch, queues = Batch(budget, kv), Queues(running, waiting)
        if len(running) < self._num_full:
            self._num_full = 0
        if self._rules.mixes_prefill:
            self._decode(batch, queues)
        num_old = _answers_left(running)
        continue_prompts(batch, queues)
        num_new = _answers_left(running) - num_old
        self._admit_prompts(batch, queues, num_new + num_old * self._share(budget.step))
        # A last token over a cached prompt is a decode by its shape, but a prompt's.
        if batch.prefills or (not self._rules.mixes_prefill and not batch.is_empty):
            self._share_step += 1
        elif not self._rules.mixes_prefill:
            self._decode(batch, queues)
        return batch

    def _decode(self, batch: Batch, queues: Queues) -> None:
        self._make_room(batch, queues)
        decode_running(batch, queues)

    def _share(self, step: int) -> float:
        """Return which part of the answers that are still to come is reserved."""
        since = step - self._share_step
        return max(FIRST_SHARE + self._share_change - since * _DECAY, LEAST_SHARE)

    def _admit_prompts(self, batch: Batch, queues: Queues, num_reserved: float) -> None:
        """Admit as long as prompts, their answers and what is reserved fit."""
        kv, size = batch.kv, batch.kv.block_size
        while self._num_full == 0 and can_admit(batch, queues) and batch.can_prefill:
            request = queues.waiting[0]
            found, num_left = find_uncached(batch, request)
            num_answer, num_free = _answer_left(request), kv.num_free - found.num_idle
            num_blocks = kv.blocks_for(request.num_tokens) - len(found.blocks)
            num_room = num_free * size - num_reserved
            is_tight = bool(queues.running) and num_left + num_answer >= num_room
            if num_blocks > num_free or is_tight:
                self._num_full = len(queues.running)
                return
            num_new = batch.limit_piece(num_left)
            if num_new < num_left and num_new >= size:
                num_new = num_new // size * size
            elif num_new < num_left and not batch.is_empty:
                return
            batch.admit(queues, found, request.num_tokens, num_new)
            if num_new < num_left:
                return
            num_reserved += num_answer

    def _make_room(self, batch: Batch, queues: Queues) -> None:
        """Take the shortest answers back until each that stays gets its token."""
        running, num_free = queues.running, batch.kv.num_free
        if _num_blocks_wanted(batch, running) <= num_free:
            return
        while len(running) > 1 and _num_blocks_wanted(batch, running) > batch.kv.num_free:
            batch.preempt(queues, _shortest_answer(running), goes_last=True)
        num_generated = sum(request.num_generated for request in running)
        num_answers = sum(request.num_decode_tokens for request in running)
        share = (num_generated + RETRACT_STEPS * len(running)) / (num_answers + 1)
        self._share_change = min(share, 1.0) - FIRST_SHARE
        self._share_step = batch.budget.step + 1


def _answer_left(request: SimRequest) -> int:
    return min(request.num_decode_tokens - request.num_generated, MOST_ANSWER_TOKENS)


def _answers_left(running: list[SimRequest]) -> int:
    """Return how many tokens the decoding requests may still generate."""
    return sum(_answer_left(request) for request in running if request.is_decoding)


def _num_blocks_wanted(batch: Batch, running: list[SimRequest]) -> int:
    """Return how many blocks the next tokens of all running requests take."""
    return sum(
        batch.kv.blocks_for(request.num_kv_tokens_next) - request.num_blocks
        for request in running
        if batch.can_schedule(request)
    )


def _shortest_answer(running: list[SimRequest]) -> int:
    """Return the place of the request with the shortest answer so far, then the longest prompt."""
    places = range(len(running))
    return min(places, key=lambda i: (running[i].num_generated, -running[i].num_prefill_tokens, -i))


SCHEDULER = SglangScheduler
