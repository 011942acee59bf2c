"""Static batching: a batch runs until all its requests are complete, then the next one begins.

With `counts_padding` each request of a batch takes as much of the KV cache and of the step as the
longest. Source: Yu et al., Orca, OSDI 2022, section 3, on FasterTransformer; its ParallelGpt.cc
allocates the cache for the longest sequence of the batch.
"""

from foretoken.simulator.engine.admission import (
    can_admit,
    continue_prompts,
    decode_running,
    fit_whole,
    num_uncached,
)
from foretoken.simulator.engine.batch import admit, can_fit, num_kv_tokens_max
from foretoken.simulator.engine.block import find_prefix, num_blocks_of
from foretoken.simulator.engine.choice import scheduler
from foretoken.simulator.engine.layout import NEVER_NS, State
from foretoken.simulator.engine.view import engines_of
from foretoken.simulator.jit import compiled_part


@scheduler
def select(state: State, e: int) -> int:
    """Choose a token for each of the batch that runs, or where none does, a new batch.

    Returns for how many steps it would choose the same while all that runs decodes.
    """
    if engines_of(state)[e].num_running > 0:
        decode_running(state, e, 0)
        continue_prompts(state, e)
    else:
        _begin_batch(state, e)
    return NEVER_NS if engines_of(state)[e].num_tokens > 0 else 0


@compiled_part
def _begin_batch(state: State, e: int) -> None:
    engine = engines_of(state)[e]
    count, longest_prompt, longest, num_room = 0, 0, 0, engine.num_free
    while can_admit(state, e):
        r = engine.first_waiting
        num_hits = find_prefix(state, e, r)
        num_left = num_uncached(state, r, num_hits)
        num_held = num_kv_tokens_max(state, r)
        longest_prompt = max(longest_prompt, num_left)
        longest = max(longest, num_blocks_of(state, num_held))
        if state.counts_padding and count > 0:
            count_padded = count + 1
            if count_padded * longest_prompt > state.max_num_tokens:
                return
            if count_padded * longest > num_room:
                return
        num_new = fit_whole(state, e, num_left)
        if num_new == 0 or not can_fit(state, e, num_hits, num_held):
            return
        admit(state, e, num_hits, num_held, num_new)
        count += 1
