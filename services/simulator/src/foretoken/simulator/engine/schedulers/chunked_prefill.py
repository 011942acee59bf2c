"""Continuous batching with chunked prefill: running requests first, then waiting ones in order.

All share one budget of tokens per step, so a long prompt is computed over several steps with
the decoding requests. When blocks run out, the latest running request is preempted. Source: vLLM
v1's default scheduler.
"""

from foretoken.simulator.engine.admission import num_repeats
from foretoken.simulator.engine.batch import (
    admit_first,
    budget_left,
    can_prefill,
    can_schedule,
    limit_piece,
    num_kv_tokens_next,
    num_to_decode,
    num_uncomputed,
    preempt,
    schedule,
)
from foretoken.simulator.engine.block import allocate
from foretoken.simulator.engine.choice import scheduler
from foretoken.simulator.engine.layout import State
from foretoken.simulator.engine.view import engines_of, requests_of, running_of


@scheduler
def select(state: State, e: int) -> int:
    """Choose the next batch: running requests in order, then waiting ones where room is left.

    Returns for how many steps it would choose the same while all that runs decodes.
    """
    engine = engines_of(state)[e]
    num_preempted = engine.num_preempted
    index = 0
    while index < engine.num_running and budget_left(state, e) > 0:
        r = running_of(state)[e, index]
        index += 1
        if not can_schedule(state, r):
            continue
        if num_uncomputed(state, r) > 1:
            if not can_prefill(state, e):
                continue
            num_new = limit_piece(state, e, num_uncomputed(state, r))
            num_held = requests_of(state)[r].num_computed + num_new
        else:
            num_new = num_to_decode(state, e, r)
            num_held = num_kv_tokens_next(state, r)
        while not allocate(state, e, r, num_held):
            if preempt(state, e, engine.num_running - 1, False) == r:
                return 0
        schedule(state, e, r, num_new)
    if engine.num_preempted > num_preempted:
        return 0
    while (
        engine.num_waiting > 0
        and engine.num_running < state.max_num_seqs
        and budget_left(state, e) > 0
        and can_prefill(state, e)
        and admit_first(state, e)
    ):
        pass
    return num_repeats(state, e)
