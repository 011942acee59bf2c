"""In-flight batching that never evicts: decoding requests first, then prompts in order.

A request is admitted when all blocks it will ever need are free besides what others may still take;
it gets them at once. A prompt is computed as a whole, or with `max_chunk_tokens` in pieces. Source:
TensorRT-LLM 1.x, GUARANTEED_NO_EVICT and the micro-batch scheduler of _torch/pyexecutor/scheduler.
"""

from foretoken.simulator.engine.admission import (
    can_admit,
    continue_prompts,
    decode_running,
    fit_whole,
    num_repeats,
    num_uncached,
)
from foretoken.simulator.engine.batch import (
    admit,
    can_fit,
    can_prefill,
    limit_piece,
    num_kv_tokens_max,
)
from foretoken.simulator.engine.block import find_prefix
from foretoken.simulator.engine.choice import scheduler
from foretoken.simulator.engine.layout import State
from foretoken.simulator.engine.view import engines_of


@scheduler
def select(state: State, e: int) -> int:
    """Choose a token for each that decodes and, in order, prompts whose answers are sure to fit.

    Returns for how many steps it would choose the same while all that runs decodes.
    """
    decode_running(state, e, 0)
    continue_prompts(state, e)
    while can_admit(state, e) and can_prefill(state, e):
        r = engines_of(state)[e].first_waiting
        num_hits = find_prefix(state, e, r)
        num_new = num_uncached(state, r, num_hits)
        if state.max_chunk_tokens > 0:
            num_new = limit_piece(state, e, num_new)
        else:
            num_new = fit_whole(state, e, num_new)
        num_held = num_kv_tokens_max(state, r)
        if num_new == 0 or not can_fit(state, e, num_hits, num_held):
            break
        admit(state, e, num_hits, num_held, num_new)
    return num_repeats(state, e)
