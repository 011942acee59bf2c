"""What a scheduler may do: look at a request, schedule a piece of it, admit it, preempt it."""

from foretoken.simulator.engine.block import (
    find_prefix,
    free_blocks,
    name_blocks,
    num_blocks_of,
    take_blocks,
    take_hits,
    take_slot,
)
from foretoken.simulator.engine.layout import (
    ADMIT_ANSWER,
    ADMIT_CHUNK,
    NONE,
    State,
    as_int64,
)
from foretoken.simulator.engine.queue import (
    pop_waiting,
    push_waiting,
    push_waiting_first,
)
from foretoken.simulator.engine.tier import can_swap_out, swap_in, swap_out
from foretoken.simulator.engine.view import (
    engines_of,
    prefill_context_of,
    prefill_tokens_of,
    prefills_of,
    requests_of,
    row_tokens_of,
    rows_of,
    running_of,
    yields_of,
)
from foretoken.simulator.jit import compiled_part


@compiled_part
def num_uncomputed(state: State, r: int) -> int:
    """Return how many tokens of a request are to compute before it gets the next; 1: it decodes."""
    request = requests_of(state)[r]
    return int(request.num_prefill + request.num_generated - request.num_computed)


@compiled_part
def can_schedule(state: State, r: int) -> bool:
    """Whether a request wants another token, and what that needs is known and loaded.

    A synchronous engine has to see a token before it can schedule the next.
    """
    request = requests_of(state)[r]
    is_known = state.is_async or request.num_generated == request.num_emitted
    is_loaded = state.num_tiers == 0 or request.loaded_ns <= state.now_ns
    return bool(is_known and is_loaded and request.num_generated < request.num_decode)


@compiled_part
def num_to_decode(state: State, e: int, r: int) -> int:
    """Return how many tokens of a decoding request to compute: the next, and what was proposed."""
    return int(min(1 + requests_of(state)[r].num_draft, budget_left(state, e)))


@compiled_part
def num_kv_tokens_next(state: State, r: int) -> int:
    """Return for how many tokens a request needs room to decode, and for what will be proposed."""
    request = requests_of(state)[r]
    return int(request.num_computed + 1 + request.num_draft + state.num_lookahead_tokens)


@compiled_part
def num_kv_tokens_max(state: State, r: int) -> int:
    """Return for how many tokens a request has room at most: the last one is not computed."""
    request = requests_of(state)[r]
    num_kept = request.num_prefill + request.num_decode - 1
    if request.num_decode > 1:
        num_kept += state.num_draft_tokens + state.num_lookahead_tokens
    return int(num_kept)


@compiled_part
def budget_left(state: State, e: int) -> int:
    """Return how many more tokens the batch may compute."""
    return int(state.max_num_tokens - engines_of(state)[e].num_tokens)


@compiled_part
def limit_piece(state: State, e: int, num_tokens: int) -> int:
    """Return how many of a request's uncomputed tokens the next batch may compute."""
    limit = state.max_chunk_tokens
    if 0 < limit < num_tokens:
        num_tokens = limit
    return min(num_tokens, budget_left(state, e))


@compiled_part
def can_prefill(state: State, e: int) -> bool:
    """Whether the batch may have another prefill."""
    engine, most = engines_of(state)[e], state.max_num_prefills
    return bool(not engine.holds_prompts and (most == 0 or engine.num_prefills < most))


@compiled_part
def schedule(state: State, e: int, r: int, num_tokens: int) -> None:
    """Add the next tokens of a running request, whose blocks are there, to the batch.

    Of those proposed for a decoding one only the accepted stay in the cache. All are verified in
    one attention over its context, whose reads set the time.
    """
    engine, request = engines_of(state)[e], requests_of(state)[r]
    num_missing, num_kept, num_rows = num_uncomputed(state, r), num_tokens, as_int64(1)
    if num_missing == 1 and request.num_computed > 0:
        if state.num_draft_tokens > 0:
            num_yield = yields_of(state)[request.yield_first + request.num_generated]
            num_kept, num_rows = min(as_int64(num_yield), num_tokens), as_int64(num_tokens)
        engine.num_decodes += 1
        engine.kv_tokens += request.num_computed + num_tokens
        engine.kv_tokens_max = max(engine.kv_tokens_max, request.num_computed + num_tokens)
    else:
        _note_prefill(state, e, r, num_tokens)
    if request.scheduled_ns == NONE:
        request.scheduled_ns = state.now_ns
    engine.num_tokens += num_tokens
    request.num_computed += num_kept
    num_new = num_kept - num_missing + 1
    if num_new > 0:
        rows_of(state)[e, engine.flight, engine.num_yielding] = r
        row_tokens_of(state)[e, engine.flight, engine.num_yielding] = num_new
        engine.num_yielding += 1
        engine.num_output_tokens += num_new
        engine.num_rows += num_rows
        request.num_generated += num_new
        request.num_draft = state.num_draft_tokens
        engine.num_repeats = min(engine.num_repeats, request.num_decode - request.num_generated)
    if request.num_shared > request.num_named and state.is_caching:
        num_full = request.num_computed // state.block_size
        name_blocks(state, e, r, min(num_full, request.num_shared))


@compiled_part
def _note_prefill(state: State, e: int, r: int, num_tokens: int) -> None:
    engine = engines_of(state)[e]
    engine.num_prefills += 1
    place = state.num_out_prefills
    state.num_out_prefills = place + 1
    prefills_of(state)[place].engine = e
    prefills_of(state)[place].step = engine.num_steps
    prefills_of(state)[place].request = r
    prefill_tokens_of(state)[place] = num_tokens
    prefill_context_of(state)[place] = requests_of(state)[r].num_computed


@compiled_part
def num_known(state: State, r: int) -> int:
    """Return how many tokens a request has: prompt and answer so far."""
    request = requests_of(state)[r]
    return int(request.num_prefill + request.num_generated)


@compiled_part
def num_tokens_to_fit(state: State, r: int, num_tokens: int) -> int:
    """Return for how many tokens a request needs room to be admitted, by the rule of admission.

    `num_tokens` are those after its first piece.
    """
    if state.admission == ADMIT_CHUNK:
        return num_tokens
    if state.admission == ADMIT_ANSWER:
        return num_kv_tokens_max(state, r)
    return num_known(state, r)


@compiled_part
def can_fit(state: State, e: int, num_hits: int, num_tokens: int) -> bool:
    """Whether there is room for a request of that many tokens, after `find_prefix` hit blocks.

    The watermark stays free, unless nothing runs.
    """
    engine = engines_of(state)[e]
    num_spare = state.watermark_blocks if engine.num_running > 0 else 0
    num_here = num_hits - state.num_stored_hits
    num_taken = num_blocks_of(state, num_tokens) - num_here + state.num_idle_hits
    return bool(num_taken <= engine.num_free - num_spare)


@compiled_part
def admit(state: State, e: int, num_hits: int, num_held: int, num_new: int) -> None:
    """Let the first waiting request run: `num_new` tokens of it are in the batch.

    It gets the blocks that `find_prefix` just hit and others for `num_held` tokens in all, which
    are at least those of hits and piece; `can_fit` said that they are there. What a tier keeps has
    to be loaded first: then it runs without being in the batch.
    """
    engine = engines_of(state)[e]
    r = pop_waiting(state, e)
    request = requests_of(state)[r]
    if request.is_swapped:
        request.is_swapped = 0
        num_blocks = num_blocks_of(state, request.num_computed)
        request.loaded_ns = swap_in(state, e, num_blocks)
        take_slot(state, e, r)
    else:
        take_hits(state, e, r, num_hits)
    take_blocks(state, e, r, num_blocks_of(state, num_held) - request.num_blocks)
    running_of(state)[e, engine.num_running] = r
    engine.num_running += 1
    engine.num_admitted_tokens += num_known(state, r)
    if request.loaded_ns <= state.now_ns:
        schedule(state, e, r, num_new)


@compiled_part
def admit_first(state: State, e: int) -> bool:
    """Let the first waiting request run if there is room, or do nothing and return False.

    It holds blocks for its first piece, or for its whole answer where admission wants that.
    """
    r = engines_of(state)[e].first_waiting
    if not can_schedule(state, r):
        return False
    num_hits = find_prefix(state, e, r)
    num_there = num_hits * state.block_size
    if requests_of(state)[r].is_swapped:
        num_there = requests_of(state)[r].num_computed
    num_new = limit_piece(state, e, num_known(state, r) - num_there)
    num_held = num_there + num_new
    num_fit = num_tokens_to_fit(state, r, num_held)
    if not can_fit(state, e, num_hits, num_fit):
        return False
    if state.admission == ADMIT_ANSWER:
        num_held = num_fit
    admit(state, e, num_hits, num_held, num_new)
    return True


@compiled_part
def preempt(state: State, e: int, index: int, goes_last: bool) -> int:
    """Take the blocks of the running request at a place and let it wait, in front or last.

    Returns the request. It computes everything again, unless it can be swapped to the first tier.
    If its last token is in flight it does not wait any more.
    """
    engine, running = engines_of(state)[e], running_of(state)
    r = running[e, index]
    engine.num_running -= 1
    for place in range(index, engine.num_running):
        running[e, place] = running[e, place + 1]
    request = requests_of(state)[r]
    # Above tiers all blocks have names; what came from elsewhere gets them with its first step.
    if state.is_caching and state.num_stored == 0 and request.scheduled_ns != NONE:
        name_blocks(state, e, r, request.num_computed // state.block_size)
    free_blocks(state, e, r)
    num_blocks = num_blocks_of(state, request.num_computed)
    if request.num_generated < request.num_decode and can_swap_out(state, e, num_blocks):
        swap_out(state, e, num_blocks)
        request.is_swapped = 1
    else:
        request.num_computed = 0
    request.num_draft = 0
    request.loaded_ns = NONE
    request.num_preemptions += 1
    engine.num_preempted += 1
    if request.num_generated < request.num_decode:
        if goes_last:
            push_waiting(state, e, r)
        else:
            push_waiting_first(state, e, r)
    return int(r)
