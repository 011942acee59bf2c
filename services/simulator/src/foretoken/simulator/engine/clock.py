"""The clock of a compiled pool: its units go on by themselves until requests end."""

from foretoken.simulator.cost.tables import DECODE, CostTables
from foretoken.simulator.engine.cost import TARGET, tables_of
from foretoken.simulator.engine.fast_forward import can_fast_forward, fast_forward
from foretoken.simulator.engine.kernel import complete_due, first_tick_ns, has_room
from foretoken.simulator.engine.layout import (
    COMPLETE,
    DONE,
    ENDED,
    IDLE,
    MORE,
    NEVER_NS,
    STUCK,
    Records,
    State,
)
from foretoken.simulator.engine.tick import complete, tick, to_ns
from foretoken.simulator.engine.view import engines_of, units_of
from foretoken.simulator.jit import compiled, compiled_part


@compiled
def advance(states: Records, horizon_ns: int) -> int:
    """Go on before the horizon, at most to the tokens of the first instant at which requests end.

    Returns DONE at the horizon, ENDED, or as `run_slice` does.
    """
    state = states[0]
    tables = tables_of(state, TARGET)
    while True:
        now_ns = first_tick_ns(state)
        state.next_ns = now_ns
        if now_ns >= horizon_ns:
            return DONE
        if not _is_ready(state):
            return MORE
        quiet_ns = min(horizon_ns, _quiet_until(state, tables))
        if quiet_ns > now_ns:
            for u in range(state.num_units):
                status = _run_quietly(state, tables, u, quiet_ns)
                if status != DONE:
                    return status
            continue
        complete_due(state, now_ns)
        if state.num_ended > 0:
            state.ended_ns = now_ns
            return ENDED
        if not _tick_due(state, tables, now_ns):
            return STUCK


@compiled
def complete_at(states: Records, now_ns: int) -> int:
    """Let the tokens that leave at an instant leave; return MORE if there is no room for that."""
    state = states[0]
    if not has_room(state):
        return MORE
    complete_due(state, now_ns)
    state.next_ns = first_tick_ns(state)
    return DONE


@compiled
def tick_at(states: Records, now_ns: int) -> int:
    """Let the units whose tick it is schedule; return MORE if there is no room for that."""
    state = states[0]
    if not _is_ready(state):
        return MORE
    is_going = _tick_due(state, tables_of(state, TARGET), now_ns)
    state.next_ns = first_tick_ns(state)
    return DONE if is_going else STUCK


@compiled
def quiet_until(states: Records) -> int:
    """Return a time before which no request ends if nobody disturbs the pool."""
    return _quiet_until(states[0], tables_of(states[0], TARGET))


@compiled_part
def _is_ready(state: State) -> bool:
    """Whether there is room for the output of a tick, and a slot for all that it may admit."""
    if not has_room(state):
        return False
    if state.is_caching:
        for e in range(state.num_engines):
            engine = engines_of(state)[e]
            if engine.num_slots < state.max_num_seqs - engine.num_running:
                return False
    return True


@compiled_part
def _tick_due(state: State, tables: CostTables, now_ns: int) -> bool:
    """Let the units whose tick it is schedule; False when one cannot go on."""
    for u in range(state.num_units):
        unit = units_of(state)[u]
        is_due = unit.next_ns == now_ns and unit.tick != COMPLETE
        if is_due and not tick(state, tables, u, now_ns):
            return False
    return True


@compiled_part
def _quiet_until(state: State, tables: CostTables) -> int:
    quiet_ns = NEVER_NS
    for u in range(state.num_units):
        quiet_ns = min(quiet_ns, _unit_quiet_until(state, tables, u))
    return quiet_ns


@compiled_part
def _unit_quiet_until(state: State, tables: CostTables, u: int) -> int:
    """Return a time before which no request of a unit ends.

    A batch that decodes takes some steps until one has all its tokens, or until blocks may be
    short; each is at least as long as its work besides attention, and they come one by one.
    """
    unit = units_of(state)[u]
    if unit.tick == IDLE or not unit.is_steady:
        return int(unit.next_ns)
    engine = engines_of(state)[unit.first_engine]
    count = engine.num_running
    num_steps = min(engine.num_repeats, engine.num_free // max(count, 1) * state.block_size)
    if engine.num_arrived > 0 or num_steps <= 0:
        return int(unit.next_ns)
    stage = state.num_stages - 1
    step_us = tables.tokens_us[stage, DECODE, count] + tables.rows_us[stage, count]
    step_us = max(step_us + state.decode_us_min, tables.floor_us[stage, DECODE, count])
    step_us = step_us * tables.stretch[DECODE, 0] + tables.stretch[DECODE, 1]
    return int(unit.next_ns + num_steps * max(to_ns(step_us) - 1, 0))


@compiled_part
def _run_quietly(state: State, tables: CostTables, u: int, horizon_ns: int) -> int:
    """Let a unit go on before a time at which no request has ended yet."""
    unit = units_of(state)[u]
    while unit.next_ns < horizon_ns:
        if not _is_ready(state):
            return MORE
        if unit.tick == COMPLETE:
            complete(state, u)
        is_fast_forwarding = (
            can_fast_forward(state, u) and fast_forward(state, tables, u, horizon_ns) > 0
        )
        if not is_fast_forwarding and not tick(state, tables, u, unit.next_ns):
            return STUCK
    return DONE
