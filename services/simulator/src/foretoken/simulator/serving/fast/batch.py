"""What a scheduler may do: look at a request, schedule a piece of it, admit it, preempt it."""

from foretoken.simulator.jit import compiled_part
from foretoken.simulator.serving.fast.block import (
    find_prefix,
    free_blocks,
    name_blocks,
    num_blocks_of,
    take_blocks,
    take_hits,
)
from foretoken.simulator.serving.fast.layout import (
    ADMIT_ANSWER,
    ADMIT_CHUNK,
    NONE,
    State,
)
from foretoken.simulator.serving.fast.queue import (
    pop_waiting,
    push_waiting,
    push_waiting_first,
)
from foretoken.simulator.serving.fast.view import (
    engines_of,
    prefill_context_of,
    prefill_tokens_of,
    prefills_of,
    requests_of,
    rows_of,
    running_of,
)


@compiled_part
def num_uncomputed(state: State, r: int) -> int:
    """Return how many tokens of a request are to compute before it gets the next; 1: it decodes."""
    request = requests_of(state)[r]
    return int(request.num_prefill + request.num_generated - request.num_computed)


@compiled_part
def can_schedule(state: State, r: int) -> bool:
    """Whether a request wants another token, and the one before is known where it must be."""
    request = requests_of(state)[r]
    is_known = state.is_async or request.num_generated == request.num_emitted
    return bool(is_known and request.num_generated < request.num_decode)


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
    most = state.max_num_prefills
    return bool(most == 0 or engines_of(state)[e].num_prefills < most)


@compiled_part
def schedule(state: State, e: int, r: int, num_tokens: int) -> None:
    """Add the next tokens of a running request, whose blocks are there, to the batch."""
    engine, request = engines_of(state)[e], requests_of(state)[r]
    num_missing = num_uncomputed(state, r)
    if num_missing == 1 and request.num_computed > 0:
        engine.num_decodes += 1
        engine.kv_tokens += request.num_computed + 1
        engine.kv_tokens_max = max(engine.kv_tokens_max, request.num_computed + 1)
    else:
        _note_prefill(state, e, r, num_tokens)
    if request.scheduled_ns == NONE:
        request.scheduled_ns = state.now_ns
    engine.num_tokens += num_tokens
    request.num_computed += num_tokens
    if num_tokens == num_missing:
        rows_of(state)[e, engine.flight, engine.num_rows] = r
        engine.num_rows += 1
        request.num_generated += 1
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
    request, admission = requests_of(state)[r], state.admission
    if admission == ADMIT_CHUNK:
        return num_tokens
    if admission == ADMIT_ANSWER:
        return int(request.num_prefill + request.num_decode - 1)
    return num_known(state, r)


@compiled_part
def can_fit(state: State, e: int, num_hits: int, num_tokens: int) -> bool:
    """Whether there is room for a request of that many tokens, after `find_prefix` hit blocks.

    The watermark stays free, unless nothing runs.
    """
    engine = engines_of(state)[e]
    num_spare = state.watermark_blocks if engine.num_running > 0 else 0
    num_taken = num_blocks_of(state, num_tokens) - num_hits + state.num_idle_hits
    return bool(num_taken <= engine.num_free - num_spare)


@compiled_part
def admit(state: State, e: int, num_hits: int, num_held: int, num_new: int) -> None:
    """Let the first waiting request run: `num_new` tokens of it are in the batch.

    It gets the blocks that `find_prefix` just hit and others for `num_held` tokens in all, which
    are at least those of hits and piece; `can_fit` said that they are there.
    """
    engine = engines_of(state)[e]
    r = pop_waiting(state, e)
    take_hits(state, e, r, num_hits)
    take_blocks(state, e, r, num_blocks_of(state, num_held) - num_hits)
    running_of(state)[e, engine.num_running] = r
    engine.num_running += 1
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
    num_cached = num_hits * state.block_size
    num_new = limit_piece(state, e, num_known(state, r) - num_cached)
    num_held = num_cached + num_new
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

    Returns the request. It computes everything again; if its last token is in flight it does not
    wait any more.
    """
    engine, running = engines_of(state)[e], running_of(state)
    r = running[e, index]
    engine.num_running -= 1
    for place in range(index, engine.num_running):
        running[e, place] = running[e, place + 1]
    request = requests_of(state)[r]
    # What came from elsewhere gets its names with its first step.
    if state.is_caching and request.scheduled_ns != NONE:
        name_blocks(state, e, r, request.num_computed // state.block_size)
    free_blocks(state, e, r)
    request.num_computed = 0
    request.num_preemptions += 1
    engine.num_preempted += 1
    if request.num_generated < request.num_decode:
        if goes_last:
            push_waiting(state, e, r)
        else:
            push_waiting_first(state, e, r)
    return int(r)
