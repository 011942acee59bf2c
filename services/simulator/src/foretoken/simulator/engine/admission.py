"""What schedulers share that compute a prompt as a whole, and give it all its blocks at once."""

from foretoken.simulator.engine.batch import (
    budget_left,
    can_schedule,
    limit_piece,
    num_kv_tokens_next,
    num_to_decode,
    num_uncomputed,
    preempt,
    schedule,
)
from foretoken.simulator.engine.block import allocate
from foretoken.simulator.engine.layout import NEVER_NS, State
from foretoken.simulator.engine.view import engines_of, requests_of, running_of
from foretoken.simulator.jit import compiled_part


@compiled_part
def is_decoding(state: State, r: int) -> bool:
    """Whether a request's prompt is computed."""
    return requests_of(state)[r].num_computed > 0 and num_uncomputed(state, r) == 1


@compiled_part
def can_admit(state: State, e: int) -> bool:
    """Whether a request waits that may join those that run."""
    engine = engines_of(state)[e]
    return bool(
        engine.num_waiting > 0
        and not engine.holds_prompts
        and engine.num_running < state.max_num_seqs
        and budget_left(state, e) > 0
        and can_schedule(state, engine.first_waiting)
    )


@compiled_part
def num_uncached(state: State, r: int, num_hits: int) -> int:
    """Return how many tokens of a waiting request are to compute beyond what is there of it."""
    return int(num_uncomputed(state, r) - num_hits * state.block_size)


@compiled_part
def fit_whole(state: State, e: int, num_tokens: int) -> int:
    """Return how many tokens of a prompt to compute now: all, or 0 where the budget is too small.

    One that is longer than a whole budget is computed in pieces.
    """
    most = budget_left(state, e)
    if most < num_tokens <= state.max_num_tokens:
        return 0
    return min(num_tokens, most)


@compiled_part
def continue_prompts(state: State, e: int) -> bool:
    """Schedule the next pieces of prompts that were begun; False where there are none."""
    engine = engines_of(state)[e]
    has_any = False
    for index in range(0 if engine.holds_prompts else engine.num_running):
        r = running_of(state)[e, index]
        if not is_decoding(state, r) and can_schedule(state, r):
            num_new = limit_piece(state, e, num_uncomputed(state, r))
            if num_new > 0:
                schedule(state, e, r, num_new)
                has_any = True
    return has_any


@compiled_part
def decode_running(state: State, e: int, num_spare: int) -> None:
    """Schedule every decoding request in order; the last running is preempted for it.

    A request needs `num_spare` free blocks even where its own has room, unless it runs alone.
    """
    engine = engines_of(state)[e]
    index = 0
    while index < engine.num_running and budget_left(state, e) > 0:
        r = running_of(state)[e, index]
        index += 1
        if is_decoding(state, r) and can_schedule(state, r) and _give_block(state, e, r, num_spare):
            schedule(state, e, r, num_to_decode(state, e, r))


@compiled_part
def _give_block(state: State, e: int, r: int, num_spare: int) -> bool:
    """Make room for a request's next tokens; False where it is itself preempted for that."""
    engine, num_tokens = engines_of(state)[e], num_kv_tokens_next(state, r)
    while True:
        is_short = engine.num_free < num_spare and engine.num_running > 1
        if not is_short and allocate(state, e, r, num_tokens):
            return True
        if preempt(state, e, engine.num_running - 1, False) == r:
            return False


@compiled_part
def num_repeats(state: State, e: int) -> int:
    """Return for how many more steps a scheduler that always looks at the queue admits nobody.

    Any number where nobody waits or may run. A request not admitted to a step that only decodes
    is not admitted later either: free blocks only get fewer. A hit in the cache may change that.
    """
    engine = engines_of(state)[e]
    if engine.num_tokens == 0:
        return 0
    if engine.num_waiting == 0 or engine.num_running >= state.max_num_seqs:
        return NEVER_NS
    if engine.holds_prompts:
        return 0
    head = requests_of(state)[engine.first_waiting]
    can_hit = state.is_caching and (head.num_shared > 0 or head.num_preemptions > 0)
    return NEVER_NS if engine.num_prefills == 0 and not can_hit else 0


@compiled_part
def num_repeats_above(state: State, e: int, num_spare: int) -> int:
    """Return the same, as long as `num_spare` blocks stay free."""
    engine = engines_of(state)[e]
    most = max(engine.num_free - num_spare, 0) // max(engine.num_running, 1)
    return int(min(num_repeats(state, e), most * state.block_size))
