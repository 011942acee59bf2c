"""Prompts in batches of their own, admitted against the most tokens that will ever be held at once.

Waiting requests are looked at when nothing runs and every `max_decode_run` steps of decoding. When
blocks run out all the same, the latest running request is preempted. Source: ModelTC/lightllm,
server/router/req_queue/continues_batch/impl.py and manager.py.
"""

import numpy as np

from foretoken.simulator.engine.admission import (
    can_admit,
    continue_prompts,
    decode_running,
    fit_whole,
    num_uncached,
)
from foretoken.simulator.engine.batch import admit, can_fit, num_known
from foretoken.simulator.engine.block import find_prefix
from foretoken.simulator.engine.choice import scheduler
from foretoken.simulator.engine.layout import NEVER_NS, State
from foretoken.simulator.engine.view import engines_of, requests_of, running_of
from foretoken.simulator.jit import compiled_part

# Index of an engine's `scratch`: the first step that decodes after the last prompts.
_STEP = 0


@scheduler
def select(state: State, e: int) -> int:
    """Choose prompts every few steps, if the most tokens ever held fit, else a token for each.

    Returns for how many steps it would choose the same while all that runs decodes.
    """
    engine = engines_of(state)[e]
    if continue_prompts(state, e) or (_may_look(state, e) and _admit_prompts(state, e)):
        engine.scratch[_STEP] = engine.num_steps + 1
        return 0
    decode_running(state, e, 0)
    most = state.max_decode_run
    if engine.num_tokens == 0:
        return 0
    if engine.num_waiting == 0 or engine.num_running >= state.max_num_seqs:
        return NEVER_NS
    if most == 0:
        return 0
    return int(most - 1 - (engine.num_steps - engine.scratch[_STEP]) % most)


@compiled_part
def _may_look(state: State, e: int) -> bool:
    engine, most = engines_of(state)[e], state.max_decode_run
    run = engine.num_steps - engine.scratch[_STEP]
    return bool(engine.num_running == 0 or most == 0 or (run > 0 and run % most == 0))


@compiled_part
def _admit_prompts(state: State, e: int) -> bool:
    engine = engines_of(state)[e]
    while can_admit(state, e):
        r = engine.first_waiting
        num_hits = find_prefix(state, e, r)
        num_new = fit_whole(state, e, num_uncached(state, r, num_hits))
        num_held = num_known(state, r)
        if num_new == 0 or not can_fit(state, e, num_hits, num_held):
            break
        num_tokens = state.num_blocks * state.block_size
        if engine.num_running > 0 and _peak_tokens(state, e, r) >= num_tokens:
            break
        admit(state, e, num_hits, num_held, num_new)
    return bool(engine.num_tokens > 0)


@compiled_part
def _peak_tokens(state: State, e: int, candidate: int) -> int:
    """Return the most tokens the running requests and one more will hold at once.

    They leave in the order of what they have left; all that remain grow until then.
    """
    engine = engines_of(state)[e]
    count = engine.num_running + 1
    held, left = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for index in range(count):
        r = candidate
        if index < engine.num_running:
            r = running_of(state)[e, index]
        request = requests_of(state)[r]
        num_generated = max(request.num_generated, 1)
        if index == engine.num_running:
            num_generated = request.num_generated + 1
        held[index] = request.num_prefill + num_generated
        left[index] = max(request.num_decode - num_generated - 1, 0)
    order = np.argsort(-left, kind="mergesort")
    total, peak = 0, 0
    for place in range(count):
        total += held[order[place]]
        peak = max(peak, left[order[place]] * (place + 1) + total)
    return peak
