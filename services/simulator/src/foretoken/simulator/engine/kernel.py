"""The clock of a compiled simulation: requests arrive, engines tick."""

from foretoken.simulator.cost.tables import CostTables
from foretoken.simulator.engine.cost import TARGET, tables_of
from foretoken.simulator.engine.fast_forward import can_fast_forward, fast_forward
from foretoken.simulator.engine.layout import (
    COMPLETE,
    DONE,
    MORE,
    NEVER_NS,
    STUCK,
    Records,
    State,
)
from foretoken.simulator.engine.queue import next_ready_ns, pop_ready
from foretoken.simulator.engine.request import enter
from foretoken.simulator.engine.tick import complete, tick
from foretoken.simulator.engine.view import units_of
from foretoken.simulator.jit import compiled, compiled_part


@compiled
def run_slice(states: Records) -> int:
    """Go on until all is done, the output is nearly full or an engine is stuck; say which."""
    state = states[0]
    tables = tables_of(state, TARGET)
    while True:
        ready_ns = next_ready_ns(state)
        first_ns = min(ready_ns, first_tick_ns(state))
        if first_ns == NEVER_NS:
            return DONE
        if not has_room(state):
            return MORE
        if state.is_dynamic or first_ns == ready_ns:
            complete_due(state, first_ns)
            _enter_at(state, first_ns)
        for u in range(state.num_units):
            status = _run_unit(state, tables, u, first_ns)
            if status != DONE:
                return status


@compiled_part
def has_room(state: State) -> bool:
    """Whether the output holds what a tick of all engines may write."""
    num_engines = state.num_engines
    most = num_engines * state.max_num_seqs
    return bool(
        state.num_out_steps + num_engines <= state.room_steps
        and state.num_out_prefills + most <= state.room_prefills
        and state.num_out_runs + 2 * most <= state.room_runs
    )


@compiled_part
def first_tick_ns(state: State) -> int:
    """Return when the next unit does something."""
    first_ns = NEVER_NS
    for u in range(state.num_units):
        first_ns = min(first_ns, units_of(state)[u].next_ns)
    return first_ns


@compiled_part
def complete_due(state: State, now_ns: int) -> None:
    """Let the tokens that leave at an instant leave."""
    for u in range(state.num_units):
        if units_of(state)[u].next_ns == now_ns and units_of(state)[u].tick == COMPLETE:
            complete(state, u)


@compiled_part
def _enter_at(state: State, now_ns: int) -> None:
    while next_ready_ns(state) == now_ns:
        enter(state, pop_ready(state), now_ns)


@compiled_part
def _run_unit(state: State, tables: CostTables, u: int, now_ns: int) -> int:
    """Let a unit do what it does before the next request; where others may send one, just once."""
    unit, horizon_ns = units_of(state)[u], next_ready_ns(state)
    if state.is_dynamic:
        if unit.next_ns != now_ns or unit.tick == COMPLETE:
            return DONE
        for other in range(state.num_units):
            if other != u:
                horizon_ns = min(horizon_ns, units_of(state)[other].next_ns)
    while state.is_dynamic or unit.next_ns < horizon_ns:
        if not state.is_dynamic and not has_room(state):
            return MORE
        if unit.tick == COMPLETE:
            complete(state, u)
        is_fast_forwarding = (
            can_fast_forward(state, u) and fast_forward(state, tables, u, horizon_ns) > 0
        )
        if not is_fast_forwarding and not tick(state, tables, u, unit.next_ns):
            return STUCK
        if state.is_dynamic:
            break
    return DONE
