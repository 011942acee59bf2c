"""Skip ahead through steps in which every running request decodes and nothing else happens.

The outcome is that of tick after tick; only the blocks that fill up are touched.
"""

from typing import NamedTuple

from foretoken.simulator.cost.tables import CostTables, StepShape, stage_us
from foretoken.simulator.engine.block import name_blocks, take_blocks
from foretoken.simulator.engine.layout import DEPLOYMENT, NONE, State, as_int64
from foretoken.simulator.engine.request import emit
from foretoken.simulator.engine.tick import deliver, to_ns, write_step
from foretoken.simulator.engine.view import (
    engines_of,
    flights_of,
    growth_of,
    prefill_tokens_of,
    requests_of,
    running_of,
    stage_free_of,
    units_of,
)
from foretoken.simulator.jit import compiled_part

# To skip ahead pays off from so many steps on.
_MIN_STEPS = 4
# Rows of `growth`: first request by step at which it needs a block, and what links them; the same
# for the steps at which a block is full and gets its name; how many need a block.
_NEED, _NEXT_NEED, _FILL, _NEXT_FILL, _COUNT = 0, 1, 2, 3, 4


@compiled_part
def can_fast_forward(state: State, u: int) -> bool:
    """Whether the next batches of a unit that ticks now are the one before again."""
    unit = units_of(state)[u]
    if not unit.is_steady or unit.num_flights != state.depth - 1:
        return False
    e = unit.first_engine
    engine = engines_of(state)[e]
    return bool(engine.num_arrived == 0 and engine.num_repeats >= _MIN_STEPS)


@compiled_part
def fast_forward(state: State, tables: CostTables, u: int, horizon_ns: int) -> int:
    """Run steps that are scheduled before the horizon, from the unit's tick on; return how many.

    In a pool their tokens leave before it too: who looks then finds the engine as it was.
    """
    unit, e = units_of(state)[u], units_of(state)[u].first_engine
    engine = engines_of(state)[e]
    first_leaving_step = engine.num_steps - unit.num_flights
    first_delivered_ns, count = unit.next_ns, as_int64(0)
    num_past_tokens = _num_emitted(state, e)
    # The step in which a request ends leaves as any other does.
    limit = engine.num_repeats - (1 - unit.num_flights)
    limit = min(limit, state.room_steps - state.num_out_steps)
    kv_tokens, kv_tokens_max = engine.kv_tokens, engine.kv_tokens_max
    # The host looks for requests before and after it prepares a step.
    host_ns = to_ns(state.host_us + state.host_us_per_seq * engine.num_running)
    while count < limit and unit.next_ns + host_ns < horizon_ns:
        contexts = (kv_tokens + engine.num_running, kv_tokens_max + 1)
        times = _time_step(state, tables, u, contexts)
        if state.role != DEPLOYMENT and times.leaving_ns >= horizon_ns:
            break
        state.now_ns = unit.next_ns
        if count == 0:
            _plan_growth(state, e)
        if not _grow(state, e, count):
            break
        count += 1
        kv_tokens, kv_tokens_max = contexts
        delivered_ns = _step(state, u, contexts, num_past_tokens, times)
        num_past_tokens += engine.num_running
        if count == 1:
            first_delivered_ns = delivered_ns
    engine.kv_tokens, engine.kv_tokens_max = kv_tokens, kv_tokens_max
    engine.num_repeats -= count
    if count > 0:
        for index in range(engine.num_running):
            r = running_of(state)[e, index]
            request = requests_of(state)[r]
            if request.num_emitted == 0:
                request.first_token_ns = first_delivered_ns
            request.num_computed += count
            request.num_generated += count
            emit(state, r, first_leaving_step, count)
    return int(count)


@compiled_part
def _num_emitted(state: State, e: int) -> int:
    """Return how many tokens have left of all that runs."""
    count = as_int64(0)
    for index in range(engines_of(state)[e].num_running):
        count += requests_of(state)[running_of(state)[e, index]].num_emitted
    return int(count)


class _StepTimes(NamedTuple):
    """When a step starts and ends, and when the tokens of the oldest in flight leave."""

    start_ns: int
    end_ns: int
    leaving_ns: int


@compiled_part
def _time_step(state: State, tables: CostTables, u: int, contexts: tuple[int, int]) -> _StepTimes:
    unit, e = units_of(state)[u], units_of(state)[u].first_engine
    count = as_int64(engines_of(state)[e].num_running)
    host_free_ns = unit.next_ns + to_ns(state.host_us + state.host_us_per_seq * count)
    start_ns = max(host_free_ns, stage_free_of(state)[u, 0])
    shape = StepShape(count, count, count, contexts[0], contexts[1], as_int64(0))
    none, stage = prefill_tokens_of(state)[:0], state.num_stages - 1
    end_ns = start_ns + to_ns(stage_us(tables, stage, shape, none, none))
    leaving_end_ns = end_ns
    if unit.num_flights > 0:
        leaving_end_ns = flights_of(state)[e, unit.first_flight].end_ns
    leaving_ns = max(leaving_end_ns, host_free_ns) + to_ns(state.output_us)
    return _StepTimes(start_ns, end_ns, leaving_ns)


@compiled_part
def _step(
    state: State, u: int, contexts: tuple[int, int], num_past_tokens: int, times: _StepTimes
) -> int:
    """Launch a step at the unit's tick and let the tokens of the oldest in flight leave.

    Returns when these are handed out, behind as many of the same answers.
    """
    unit, e = units_of(state)[u], units_of(state)[u].first_engine
    engine = engines_of(state)[e]
    kv_tokens, kv_tokens_max = contexts
    start_ns, end_ns, now_ns = times
    stage_free_of(state)[u, 0] = end_ns
    place = unit.first_flight
    flight = flights_of(state)[e, place]
    delivered_ns = deliver(state, u, engine.num_running, num_past_tokens, now_ns)
    if unit.num_flights > 0:
        write_step(state, e, place, now_ns, delivered_ns)
    flight.scheduled_ns, flight.start_ns, flight.end_ns = unit.next_ns, start_ns, end_ns
    flight.decode_kv_tokens = kv_tokens
    flight.decode_kv_tokens_max = kv_tokens_max
    flight.num_waiting = engine.num_waiting
    flight.num_used_blocks = state.num_blocks - engine.num_free
    flight.step = engine.num_steps
    # It looked for requests before this step, if at all: which steps do is decided by their number.
    if engine.num_steps - unit.received_step >= state.receive_interval:
        unit.received_step = engine.num_steps
    engine.num_steps += 1
    if unit.num_flights == 0:
        write_step(state, e, place, now_ns, delivered_ns)
    unit.next_ns = now_ns
    unit.host_free_ns = now_ns
    return delivered_ns


@compiled_part
def _plan_growth(state: State, e: int) -> None:
    """List the requests by the step, within a block, that takes or fills one; in running order."""
    engine, growth, size = engines_of(state)[e], growth_of(state), state.block_size
    for place in range(size):
        growth[_NEED, place] = NONE
        growth[_FILL, place] = NONE
        growth[_COUNT, place] = 0
    for index in range(engine.num_running - 1, -1, -1):
        r = running_of(state)[e, index]
        request = requests_of(state)[r]
        need = request.num_blocks * size - request.num_computed
        if need < size:
            growth[_NEXT_NEED, index] = growth[_NEED, need]
            growth[_NEED, need] = index
            growth[_COUNT, need] += 1
        if request.num_shared > request.num_named:
            fill = (size - 1 - request.num_computed) % size
            growth[_NEXT_FILL, index] = growth[_FILL, fill]
            growth[_FILL, fill] = index


@compiled_part
def _grow(state: State, e: int, count: int) -> bool:
    """Take and name the blocks of the step after `count` others; False when they are short."""
    engine, growth, size = engines_of(state)[e], growth_of(state), state.block_size
    place = count % size
    if growth[_COUNT, place] > engine.num_free:
        return False
    index = growth[_NEED, place]
    while index != NONE:
        take_blocks(state, e, running_of(state)[e, index], as_int64(1))
        index = growth[_NEXT_NEED, index]
    if state.is_caching:
        index = growth[_FILL, place]
        while index != NONE:
            r = running_of(state)[e, index]
            request = requests_of(state)[r]
            num_full = (request.num_computed + count + 1) // size
            name_blocks(state, e, r, min(num_full, request.num_shared))
            index = growth[_NEXT_FILL, index]
    return True
