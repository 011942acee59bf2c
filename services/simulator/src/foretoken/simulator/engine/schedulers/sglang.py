"""Prompts first, in batches of their own, admitted against a share of the answers still to come.

With `mixes_prefill` all that runs decodes in those batches too, and prompts have what it leaves.

The share falls while all goes well; when blocks run out, the requests with the shortest answers so
far are taken back to the end of the queue, and the share is set anew from what was generated. Once
a request did not fit nobody is admitted until one has left. The last prompt of a batch is cut at
the budget and goes on in the next step. Source: SGLang 0.5.9, srt/managers/schedule_policy.py,
scheduler.py and schedule_batch.py.
"""

from foretoken.simulator.engine.admission import (
    can_admit,
    continue_prompts,
    decode_running,
    is_decoding,
    num_repeats,
    num_uncached,
)
from foretoken.simulator.engine.batch import (
    admit,
    can_prefill,
    can_schedule,
    limit_piece,
    num_known,
    num_kv_tokens_next,
    preempt,
)
from foretoken.simulator.engine.block import find_prefix, num_blocks_of
from foretoken.simulator.engine.choice import scheduler
from foretoken.simulator.engine.layout import NEVER_NS, State
from foretoken.simulator.engine.view import engines_of, requests_of, running_of
from foretoken.simulator.jit import compiled_part

# Of an answer, as much as this is looked at when its request is admitted; the share that is kept
# free at first, in the end, and the decode steps in between; and for how many steps what stays is
# to have room after a retraction. Source: SGLang 0.5.9, srt/environ.py (the least share is 0.14 of
# the first).
MOST_ANSWER_TOKENS = 4096
FIRST_SHARE, LEAST_SHARE, SHARE_STEPS = 0.7, 0.7 * 0.14, 600
RETRACT_STEPS = 20
_DECAY = (FIRST_SHARE - LEAST_SHARE) / SHARE_STEPS
# An engine's own, in `scratch`: the step the share falls from, and how many ran when no more could
# be admitted (0: more may be); in `scratch_ratio` what the share was last set to, less the first.
_STEP, _FULL = 0, 1


@scheduler
def select(state: State, e: int) -> int:
    """Choose prompts, and where there are none or they mix, a token for each that runs.

    Returns for how many steps it would choose the same while all that runs decodes.
    """
    engine = engines_of(state)[e]
    if engine.num_running < engine.scratch[_FULL]:
        engine.scratch[_FULL] = 0
    if state.mixes_prefill:
        _make_room(state, e)
        decode_running(state, e, 0)
    num_old = _answers_left(state, e)
    continue_prompts(state, e)
    num_new = _answers_left(state, e) - num_old
    _admit_prompts(state, e, num_new + num_old * _share(state, e))
    if engine.num_prefills > 0 or (not state.mixes_prefill and engine.num_tokens > 0):
        engine.scratch[_STEP] += 1
    elif not state.mixes_prefill:
        _make_room(state, e)
        decode_running(state, e, 0)
    if engine.scratch[_FULL] > 0 and engine.num_tokens > 0:
        return NEVER_NS
    return num_repeats(state, e)


@compiled_part
def _share(state: State, e: int) -> float:
    """Return which part of the answers that are still to come is reserved."""
    engine = engines_of(state)[e]
    since = engine.num_steps - engine.scratch[_STEP]
    return float(max(FIRST_SHARE + engine.scratch_ratio - since * _DECAY, LEAST_SHARE))


@compiled_part
def _answers_left(state: State, e: int) -> int:
    """Return how many tokens the decoding requests may still generate."""
    total = 0
    for index in range(engines_of(state)[e].num_running):
        r = running_of(state)[e, index]
        if is_decoding(state, r):
            total += _answer_left(state, r)
    return total


@compiled_part
def _answer_left(state: State, r: int) -> int:
    request = requests_of(state)[r]
    return int(min(request.num_decode - request.num_generated, MOST_ANSWER_TOKENS))


@compiled_part
def _admit_prompts(state: State, e: int, num_reserved: float) -> None:
    """Admit as long as prompts, their answers and what is reserved fit."""
    engine, size = engines_of(state)[e], state.block_size
    while engine.scratch[_FULL] == 0 and can_admit(state, e) and can_prefill(state, e):
        r = engine.first_waiting
        num_hits = find_prefix(state, e, r)
        num_left, num_answer = num_uncached(state, r, num_hits), _answer_left(state, r)
        num_held, num_free = num_known(state, r), engine.num_free - state.num_idle_hits
        num_room = num_free * size - num_reserved
        num_here = num_hits - state.num_stored_hits
        if num_blocks_of(state, num_held) - num_here > num_free or (
            engine.num_running > 0 and num_left + num_answer >= num_room
        ):
            engine.scratch[_FULL] = engine.num_running
            return
        num_new = limit_piece(state, e, num_left)
        if num_new < num_left and num_new >= size:
            num_new = num_new // size * size
        elif num_new < num_left and engine.num_tokens > 0:
            return
        admit(state, e, num_hits, num_held, num_new)
        if num_new < num_left:
            return
        num_reserved += num_answer


@compiled_part
def _make_room(state: State, e: int) -> None:
    """Take the shortest answers back until each that stays gets its token; set the share anew."""
    engine = engines_of(state)[e]
    if _num_blocks_wanted(state, e) <= engine.num_free:
        return
    while engine.num_running > 1 and _num_blocks_wanted(state, e) > engine.num_free:
        preempt(state, e, _shortest_answer(state, e), True)
    num_generated, num_answers = 0, 0
    for index in range(engine.num_running):
        request = requests_of(state)[running_of(state)[e, index]]
        num_generated += request.num_generated
        num_answers += request.num_decode
    share = (num_generated + RETRACT_STEPS * engine.num_running) / (num_answers + 1)
    engine.scratch_ratio = min(share, 1.0) - FIRST_SHARE
    engine.scratch[_STEP] = engine.num_steps + 1


@compiled_part
def _num_blocks_wanted(state: State, e: int) -> int:
    """Return how many blocks the next tokens of all running requests take."""
    wanted = 0
    for index in range(engines_of(state)[e].num_running):
        r = running_of(state)[e, index]
        if can_schedule(state, r):
            num_tokens = num_kv_tokens_next(state, r)
            wanted += num_blocks_of(state, num_tokens) - requests_of(state)[r].num_blocks
    return wanted


@compiled_part
def _shortest_answer(state: State, e: int) -> int:
    """Return the place of the request with the shortest answer so far, then the longest prompt."""
    place, running = 0, running_of(state)
    for index in range(1, engines_of(state)[e].num_running):
        best, request = requests_of(state)[running[e, place]], requests_of(state)[running[e, index]]
        if request.num_generated < best.num_generated or (
            request.num_generated == best.num_generated and request.num_prefill >= best.num_prefill
        ):
            place = index
    return place
