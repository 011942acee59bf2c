"""One tick of an engine's loop: schedule a batch, or complete the oldest in flight."""

import numpy as np

from foretoken.domain.units import NS_PER_US
from foretoken.simulator.cost.tables import CostTables, StepShape, stage_us, with_shared_us
from foretoken.simulator.engine.choice import call_select
from foretoken.simulator.engine.cost import draft_shared_us, draft_us
from foretoken.simulator.engine.dealing import deal_arrivals
from foretoken.simulator.engine.layout import (
    COMPLETE,
    IDLE,
    NEVER_NS,
    NONE,
    PREFILL_ONLY,
    TICK,
    Records,
    State,
    as_int64,
)
from foretoken.simulator.engine.prompt_wait import hold_prompts, must_receive
from foretoken.simulator.engine.queue import admit_arrivals, deals, pop_waiting, seat_transferred_in
from foretoken.simulator.engine.request import (
    emit,
    emit_together,
    finish,
    refuse_unfit,
)
from foretoken.simulator.engine.view import (
    compiled_of,
    engines_of,
    flights_of,
    group_kernels_of,
    own_kernels_of,
    prefill_context_of,
    prefill_tokens_of,
    requests_of,
    row_tokens_of,
    rows_of,
    running_of,
    stage_free_of,
    steps_of,
    units_of,
)
from foretoken.simulator.jit import compiled_part


@compiled_part
def to_ns(time_us: float) -> int:
    """Return a time in whole ns."""
    return np.int64(np.rint(time_us * NS_PER_US))  # type: ignore[return-value]


@compiled_part
def tick(state: State, tables: CostTables, u: int, now_ns: int) -> bool:
    """Schedule if possible, else wait; False when the engines cannot go on."""
    unit = units_of(state)[u]
    state.now_ns = now_ns
    receives = must_receive(state, u)
    is_dealing = deals(state, u)
    if receives and is_dealing and engines_of(state)[unit.first_engine].num_arrived > 0:
        deal_arrivals(state, u, now_ns)
    for e in range(unit.first_engine, unit.first_engine + unit.num_engines):
        engine = engines_of(state)[e]
        has_transferred_in = (
            engine.num_transferred_in > 0 and engine.num_running < state.max_num_seqs
        )
        is_unranked = state.has_priorities and not engine.is_ranked
        has_arrivals = receives and engine.num_arrived > 0 and not is_dealing
        if has_arrivals or has_transferred_in or is_unranked:
            unit.is_steady = 0
            admit_arrivals(state, e, now_ns)
    if receives:
        unit.received_step = engines_of(state)[unit.first_engine].num_steps
    if unit.num_flights < state.depth and _choose(state, u):
        _launch(state, tables, u, now_ns)
        unit.tick = TICK
        unit.next_ns = unit.host_free_ns
    elif unit.num_flights > 0:
        unit.tick = COMPLETE
        unit.next_ns = _leaving_ns(state, u)
    elif not receives:
        # Without work its loop turns until it looks.
        unit.received_step -= state.receive_interval
        unit.tick = TICK
        unit.next_ns = now_ns
    else:
        return _rest(state, u, now_ns)
    return True


@compiled_part
def complete(state: State, u: int) -> None:
    """Let the tokens of the oldest batch leave, at the unit's `next_ns`; then it ticks."""
    unit = units_of(state)[u]
    now_ns, num_rows, num_past_tokens = unit.next_ns, 0, as_int64(0)
    for e in range(unit.first_engine, unit.first_engine + unit.num_engines):
        num_yielding = flights_of(state)[e, unit.first_flight].num_yielding
        num_rows += num_yielding
        for index in range(num_yielding):
            r = rows_of(state)[e, unit.first_flight, index]
            num_past_tokens += requests_of(state)[r].num_emitted
    delivered_ns = deliver(state, u, num_rows, num_past_tokens, now_ns)
    for e in range(unit.first_engine, unit.first_engine + unit.num_engines):
        flight = flights_of(state)[e, unit.first_flight]
        step = flight.step
        has_finished = False
        for index in range(flight.num_yielding):
            r = rows_of(state)[e, unit.first_flight, index]
            request = requests_of(state)[r]
            if request.num_emitted == 0:
                request.first_token_ns = delivered_ns
            count = row_tokens_of(state)[e, unit.first_flight, index]
            if count == 1:
                emit(state, r, step, 1)
            else:
                emit_together(state, r, step, count)
            if request.num_emitted == request.num_decode:
                finish(state, e, r, delivered_ns)
                has_finished = True
        write_step(state, e, unit.first_flight, now_ns, delivered_ns)
        if has_finished:
            _clear_finished(state, e)
    unit.first_flight = (unit.first_flight + 1) % state.depth
    unit.num_flights -= 1
    unit.host_free_ns = now_ns
    unit.tick = TICK


@compiled_part
def deliver(state: State, u: int, num_rows: int, num_past_tokens: int, now_ns: int) -> int:
    """Hand tokens to the output server of a unit; return when it has handed them out.

    It runs next to the engine and serves one step's tokens after the other's; their answers so far
    have so many tokens together.
    """
    unit = units_of(state)[u]
    begin_ns = max(unit.output_free_ns, now_ns)
    output_us = state.output_us_per_seq * num_rows
    output_us += state.output_us_per_past_token * num_past_tokens
    unit.output_free_ns = begin_ns + to_ns(output_us)
    return int(unit.output_free_ns)


@compiled_part
def write_step(state: State, e: int, flight: int, end_ns: int, delivered_ns: int) -> None:
    """Write down a step that is over."""
    place = state.num_out_steps
    state.num_out_steps = place + 1
    steps_of(state)[place] = flights_of(state)[e, flight]
    steps_of(state)[place].end_ns = end_ns
    steps_of(state)[place].delivered_ns = delivered_ns


@compiled_part
def _choose(state: State, u: int) -> bool:
    """Choose a batch on every engine of the unit; False when all are empty."""
    unit = units_of(state)[u]
    # Where nothing is launched, there is no batch to repeat.
    unit.is_steady = 0
    flight = (unit.first_flight + unit.num_flights) % state.depth
    has_work = False
    hold_prompts(state, u)
    for e in range(unit.first_engine, unit.first_engine + unit.num_engines):
        engine = engines_of(state)[e]
        _begin(state, e, flight)
        num_preempted = engine.num_preempted
        num_repeats = call_select(state.select_at, state, e)
        if engine.num_tokens == 0 and engine.num_preempted > num_preempted:
            # The preempted gave back what others, or they themselves, can now use.
            seat_transferred_in(state, e)
            num_repeats = call_select(state.select_at, state, e)
        engine.num_repeats = min(engine.num_repeats, num_repeats)
        if not engine.holds_prompts:
            engine.is_crowded = engine.num_waiting > 0
        has_work = has_work or engine.num_tokens > 0
    return has_work


@compiled_part
def _begin(state: State, e: int, flight: int) -> None:
    engine = engines_of(state)[e]
    engine.flight = flight
    engine.num_tokens = 0
    engine.num_rows = 0
    engine.num_yielding = 0
    engine.num_output_tokens = 0
    engine.num_admitted_tokens = 0
    engine.num_decodes = 0
    engine.num_prefills = 0
    engine.first_prefill = state.num_out_prefills
    engine.kv_tokens = 0
    engine.kv_tokens_max = 0
    engine.num_repeats = NEVER_NS


@compiled_part
def _launch(state: State, tables: CostTables, u: int, now_ns: int) -> None:
    """Send the chosen batches through the stages."""
    unit = units_of(state)[u]
    first, last = unit.first_engine, unit.first_engine + unit.num_engines
    num_seqs, num_tokens, total_seqs = 0, as_int64(0), as_int64(0)
    num_admitted = as_int64(0)
    for e in range(first, last):
        engine = engines_of(state)[e]
        num_seqs = max(num_seqs, engine.num_decodes + engine.num_prefills)
        total_seqs += engine.num_decodes + engine.num_prefills
        num_tokens += engine.num_tokens
        num_admitted = max(num_admitted, engine.num_admitted_tokens)
    host_us = state.host_us + state.host_us_per_seq * num_seqs + _compile_us(state, u)
    host_us += state.admission_us_per_token * num_admitted
    unit.host_free_ns = now_ns + to_ns(host_us)
    ready_ns = start_ns = unit.host_free_ns
    for stage in range(state.num_stages):
        ready_ns = max(ready_ns, stage_free_of(state)[u, stage])
        if stage == 0:
            start_ns = ready_ns
        slowest_us = 0.0
        for e in range(first, last):
            slowest_us = max(slowest_us, _engine_us(state, tables, e, stage))
        slowest_us = with_shared_us(tables, stage, slowest_us, num_tokens)
        if state.num_draft_passes > 0 and stage == 0:
            slowest_us += draft_shared_us(state, num_tokens, total_seqs)
        ready_ns += to_ns(slowest_us)
        stage_free_of(state)[u, stage] = ready_ns
    for e in range(first, last):
        _note_flight(state, e, (now_ns, start_ns, ready_ns))
    unit.num_flights += 1
    unit.is_steady = unit.num_engines == 1 and _is_steady(state, first)


@compiled_part
def _compile_us(state: State, u: int) -> float:
    """Return how long a step with prompts waits for kernels that none before it needed.

    Engines in lock step compile their own at once, and all have those that depend on all tokens.
    Where they only compute prompts they are empty as a step begins, and the first get what there
    is. Source: TensorRT-LLM, _torch/pyexecutor/executor_request_queue.py (of equals the lowest
    rank).
    """
    if state.num_kernels == 0:
        return 0.0
    unit = units_of(state)[u]
    most, num_tokens, num_busy = 0, as_int64(0), 0
    for e in range(unit.first_engine, unit.first_engine + unit.num_engines):
        engine = engines_of(state)[e]
        num_tokens += engine.num_tokens
        if engine.num_prefills > 0:
            rank = unit.first_engine + num_busy if state.role == PREFILL_ONLY else e
            num_busy += 1
            kernels = own_kernels_of(state)[:, engine.num_tokens]
            most = max(most, _compile(state, rank, kernels))
    if num_busy > 0 and state.num_group_kernels > 0:
        kernels = group_kernels_of(state)[:, num_tokens]
        most += _compile(state, unit.first_engine, kernels)
    return float(state.compile_us * most)


@compiled_part
def _compile(state: State, e: int, kernels: Records) -> int:
    """Compile those of some kernels that an engine does not have, and count them."""
    count = 0
    for kernel in kernels:
        if compiled_of(state)[e, kernel] == 0:
            compiled_of(state)[e, kernel] = 1
            count += 1
    return count


@compiled_part
def _engine_us(state: State, tables: CostTables, e: int, stage: int) -> float:
    engine = engines_of(state)[e]
    first, last = engine.first_prefill, engine.first_prefill + engine.num_prefills
    shape = StepShape(
        as_int64(engine.num_tokens),
        as_int64(engine.num_rows),
        as_int64(engine.num_decodes),
        engine.kv_tokens,
        engine.kv_tokens_max,
        as_int64(engine.num_prefills),
    )
    tokens = prefill_tokens_of(state)[first:last]
    context = prefill_context_of(state)[first:last]
    total_us = stage_us(tables, stage, shape, tokens, context)
    # Models with a draft are on one stage.
    if state.num_draft_passes > 0 and stage == 0:
        total_us += draft_us(state, shape, tokens, context)
    return total_us


@compiled_part
def _note_flight(state: State, e: int, times_ns: tuple[int, int, int]) -> None:
    engine, flight = engines_of(state)[e], flights_of(state)[e, engines_of(state)[e].flight]
    flight.scheduled_ns, flight.start_ns, flight.end_ns = times_ns
    flight.decode_kv_tokens = engine.kv_tokens
    flight.decode_kv_tokens_max = engine.kv_tokens_max
    flight.num_tokens = engine.num_tokens
    flight.num_rows = engine.num_rows
    flight.num_yielding = engine.num_yielding
    flight.num_output_tokens = engine.num_output_tokens
    flight.num_decodes = engine.num_decodes
    flight.num_prefills = engine.num_prefills
    flight.num_running = engine.num_running
    flight.num_waiting = engine.num_waiting
    flight.num_used_blocks = state.num_blocks - engine.num_free
    flight.num_preempted = engine.num_preempted
    flight.engine = e
    flight.step = engine.num_steps
    engine.num_steps += 1
    engine.num_preempted = 0


@compiled_part
def _is_steady(state: State, e: int) -> bool:
    """Whether the batch that was launched is all that runs, and decodes a token of each.

    What a tier keeps depends on the order in which blocks are taken and named.
    """
    engine = engines_of(state)[e]
    flight = flights_of(state)[e, engine.flight]
    return bool(
        state.num_stages == 1
        and state.num_draft_tokens == 0
        and state.num_draft_passes == 0
        and state.num_stored == 0
        and engine.num_decodes == engine.num_running
        and engine.num_rows == engine.num_running
        and flight.num_preempted == 0
    )


@compiled_part
def _leaving_ns(state: State, u: int) -> int:
    """Return when the tokens of the oldest batch leave."""
    unit = units_of(state)[u]
    # Engines of a unit are in lock step.
    end_ns = flights_of(state)[unit.first_engine, unit.first_flight].end_ns
    return int(max(end_ns, unit.host_free_ns) + to_ns(state.output_us))


@compiled_part
def _rest(state: State, u: int, now_ns: int) -> bool:
    """Wait for a request or a tier; one that waits where no block is used will never fit."""
    unit = units_of(state)[u]
    unit.tick = IDLE
    unit.next_ns = _loaded_ns(state, u, now_ns) if state.num_tiers > 0 else NEVER_NS
    if unit.next_ns < NEVER_NS:
        return True
    for e in range(unit.first_engine, unit.first_engine + unit.num_engines):
        engine = engines_of(state)[e]
        if engine.num_running > 0:
            return False
        if engine.num_waiting > 0 and engine.num_free == state.num_blocks:
            refuse_unfit(state, pop_waiting(state, e), now_ns)
            unit.tick = TICK
            unit.next_ns = now_ns
            return True
    return True


@compiled_part
def _loaded_ns(state: State, u: int, now_ns: int) -> int:
    """Return when the next running request that waits for a tier may go on."""
    unit, loaded_ns = units_of(state)[u], NEVER_NS
    for e in range(unit.first_engine, unit.first_engine + unit.num_engines):
        for index in range(engines_of(state)[e].num_running):
            each_ns = requests_of(state)[running_of(state)[e, index]].loaded_ns
            if now_ns < each_ns < loaded_ns:
                loaded_ns = each_ns
    return int(loaded_ns)


@compiled_part
def _clear_finished(state: State, e: int) -> None:
    engine, running = engines_of(state)[e], running_of(state)
    count = 0
    for index in range(engine.num_running):
        r = running[e, index]
        if requests_of(state)[r].finished_ns == NONE:
            running[e, count] = r
            count += 1
    engine.num_running = count
