"""TensorRT-LLM's rules, as in `schedulers/trtllm.py`."""

from foretoken.simulator.serving.fast.admission import (
    can_admit,
    continue_prompts,
    decode_running,
    fit_whole,
    num_repeats,
    num_uncached,
)
from foretoken.simulator.serving.fast.batch import (
    admit,
    can_fit,
    can_prefill,
    limit_piece,
    num_kv_tokens_max,
)
from foretoken.simulator.serving.fast.block import find_prefix
from foretoken.simulator.serving.fast.choice import chooses
from foretoken.simulator.serving.fast.layout import State
from foretoken.simulator.serving.fast.view import engines_of


@chooses
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
