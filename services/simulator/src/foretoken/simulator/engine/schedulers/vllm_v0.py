"""Prompts first, in batches of their own; where none can be computed, all that runs decodes.

A prompt gets all its blocks on admission, less a watermark. When blocks run out, the latest
running request is preempted, by recompute or swap; what was swapped out comes back before anybody
new. Source: vLLM 0.6.6, core/scheduler.py without chunked prefill.
"""

from foretoken.simulator.engine.admission import (
    can_admit,
    continue_prompts,
    decode_running,
    fit_whole,
    num_repeats_above,
    num_uncached,
)
from foretoken.simulator.engine.batch import admit, can_fit, num_known
from foretoken.simulator.engine.block import find_prefix
from foretoken.simulator.engine.choice import scheduler
from foretoken.simulator.engine.layout import State
from foretoken.simulator.engine.view import engines_of, requests_of
from foretoken.simulator.jit import compiled_part


@scheduler
def select(state: State, e: int) -> int:
    """Choose prompts, or where there are none to compute, a token for each that runs.

    Returns for how many steps it would choose the same while all that runs decodes.
    """
    if not continue_prompts(state, e):
        _admit_prompts(state, e)
    if engines_of(state)[e].num_tokens == 0:
        num_preempted = engines_of(state)[e].num_preempted
        decode_running(state, e, 1)
        if engines_of(state)[e].num_preempted == num_preempted:
            _swap_in(state, e)
    return num_repeats_above(state, e, 1)


@compiled_part
def _admit_prompts(state: State, e: int) -> None:
    engine = engines_of(state)[e]
    count, longest = 0, 0
    while can_admit(state, e) and not requests_of(state)[engine.first_waiting].is_swapped:
        r = engine.first_waiting
        num_hits = find_prefix(state, e, r)
        num_left = num_uncached(state, r, num_hits)
        longest = max(longest, num_left)
        if state.counts_padding and count > 0 and (count + 1) * longest > state.max_num_tokens:
            return
        num_new = fit_whole(state, e, num_left)
        num_held = num_known(state, r)
        if num_new == 0 or not can_fit(state, e, num_hits, num_held):
            return
        admit(state, e, num_hits, num_held, num_new)
        count += 1


@compiled_part
def _swap_in(state: State, e: int) -> None:
    """Let what was swapped out come back, before anybody new."""
    engine = engines_of(state)[e]
    while can_admit(state, e) and requests_of(state)[engine.first_waiting].is_swapped:
        r = engine.first_waiting
        num_hits, num_held = find_prefix(state, e, r), num_known(state, r)
        if not can_fit(state, e, num_hits, num_held):
            return
        admit(state, e, num_hits, num_held, num_uncached(state, r, num_hits))
