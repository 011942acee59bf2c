"""Steps that leave prompts for later: to gather more of them, or until all engines have some.

Sources: TensorRT-LLM 1.x, _torch/pyexecutor/py_executor.py (`_waiting_requests`,
`_balance_adp_requests`); vLLM 0.31, v1/engine/core.py and v1/core/sched/scheduler.py
(`prefill_schedule_interval`); SGLang 0.5.20, srt/managers/scheduler_components/recv_skipper.py.
"""

from foretoken.simulator.engine.admission import is_decoding, num_uncached
from foretoken.simulator.engine.batch import can_schedule, num_kv_tokens_max, num_uncomputed
from foretoken.simulator.engine.block import find_prefix, num_blocks_of
from foretoken.simulator.engine.layout import NONE, State
from foretoken.simulator.engine.view import engines_of, requests_of, running_of, units_of
from foretoken.simulator.jit import compiled_part


@compiled_part
def hold_prompts(state: State, u: int) -> None:
    """Decide of every engine of a unit whether the batch it is about to choose has no prompts."""
    unit = units_of(state)[u]
    first, last = unit.first_engine, unit.first_engine + unit.num_engines
    if state.prefill_interval > 1:
        for e in range(first, last):
            engines_of(state)[e].holds_prompts = _is_between_prompts(state, e)
    elif state.batch_wait_tokens > 0 and unit.num_engines == 1:
        engines_of(state)[first].holds_prompts = _gathers_prompts(state, u)
    elif state.balance_timeout_iters > 0 and unit.num_engines > 1:
        is_waiting = _waits_for_all(state, u)
        for e in range(first, last):
            engines_of(state)[e].holds_prompts = is_waiting


@compiled_part
def must_receive(state: State, u: int) -> bool:
    """Whether a unit looks for new requests: after prompts, idle, and every few steps.

    Where it does not look before every step, it does not look again after it has launched one.
    """
    if state.receive_interval <= 1:
        return True
    unit, is_idle = units_of(state)[u], True
    if unit.num_flights == state.depth:
        return False
    for e in range(unit.first_engine, unit.first_engine + unit.num_engines):
        engine = engines_of(state)[e]
        is_idle = is_idle and engine.num_running == 0
        if engine.num_prefills > 0:
            return True
    num_steps = engines_of(state)[unit.first_engine].num_steps
    return bool(is_idle or num_steps - unit.received_step >= state.receive_interval)


@compiled_part
def _is_between_prompts(state: State, e: int) -> bool:
    """Whether a step is none of those for prompts; where some were left over, all are."""
    engine = engines_of(state)[e]
    if engine.num_steps % state.prefill_interval == 0 or engine.is_crowded:
        return False
    return _num_decoding(state, e) > 0


@compiled_part
def _gathers_prompts(state: State, u: int) -> bool:
    """Whether prompts wait, next to those that decode, for more of them to come."""
    unit = units_of(state)[u]
    e, most = unit.first_engine, state.batch_wait_tokens
    num_decodes = _num_decoding(state, e)
    num_prompt_tokens = _num_prompt_tokens(state, e, most) if num_decodes > 0 else 0
    if num_prompt_tokens == 0:
        return False
    num_tokens = num_prompt_tokens + num_decodes * (1 + state.num_draft_tokens)
    if unit.num_waited >= state.batch_wait_iters or num_tokens >= most:
        unit.num_waited = 0
        return False
    unit.num_waited += 1
    return True


@compiled_part
def _waits_for_all(state: State, u: int) -> bool:
    """Whether the prompts of some engines wait until each has one, so that none idles for them."""
    unit = units_of(state)[u]
    has_room = has_prompts = has_decodes = True
    for e in range(unit.first_engine, unit.first_engine + unit.num_engines):
        num_decodes = _num_decoding(state, e)
        has_room = has_room and num_decodes < state.max_num_seqs
        has_decodes = has_decodes and num_decodes > 0
        has_prompts = has_prompts and _num_prompt_tokens(state, e, 1) > 0
    if has_room and has_prompts:
        unit.num_waited = 0
        if has_decodes and unit.num_gathered < state.balance_wait_iters:
            unit.num_gathered += 1
            return True
        if has_decodes:
            unit.num_gathered = 0
        return False
    unit.num_waited += 1
    if unit.num_waited >= state.balance_timeout_iters or not has_decodes:
        unit.num_waited = 0
        return False
    return True


@compiled_part
def _num_decoding(state: State, e: int) -> int:
    """Return how many requests get a token in the next batch."""
    count = 0
    for index in range(engines_of(state)[e].num_running):
        r = running_of(state)[e, index]
        if is_decoding(state, r) and can_schedule(state, r):
            count += 1
    return count


@compiled_part
def _num_prompt_tokens(state: State, e: int, most: int) -> int:
    """Return how many tokens of prompts could be computed now; they are counted up to `most`."""
    engine, num_tokens = engines_of(state)[e], 0
    for index in range(engine.num_running):
        r = running_of(state)[e, index]
        if not is_decoding(state, r) and can_schedule(state, r):
            num_tokens += num_uncomputed(state, r)
    r, num_free = int(engine.first_waiting), int(engine.num_free)
    num_seats = state.max_num_seqs - engine.num_running
    while r != NONE and num_seats > 0 and num_tokens < most and can_schedule(state, r):
        num_hits = find_prefix(state, e, r)
        num_here = num_hits - state.num_stored_hits
        num_free -= num_blocks_of(state, num_kv_tokens_max(state, r)) - num_here
        num_free -= state.num_idle_hits
        if num_free < 0:
            break
        num_tokens += num_uncached(state, r, num_hits)
        num_seats -= 1
        r = int(requests_of(state)[r].next)
    return int(min(num_tokens, most))
