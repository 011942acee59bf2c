"""How requests are given to the engines of a compiled pool, and their blocks taken and freed."""

from typing import Any

from foretoken.simulator.engine.block import (
    free_blocks,
    num_blocks_of,
    take_blocks,
    take_slot,
)
from foretoken.simulator.engine.layout import DECODE_ONLY, NONE, Records
from foretoken.simulator.engine.queue import place_of_arrival, push_arrived, wake
from foretoken.simulator.engine.view import engines_of, requests_of, units_of
from foretoken.simulator.jit import compiled, compiled_part


@compiled
def submit(states: Records, e: int, r: int, now_ns: int) -> None:
    """Give an engine a request, which it sees when it next ticks; an idle one ticks now."""
    state = states[0]
    request = requests_of(state)[r]
    e = place_of_arrival(state, e)
    _begin(request, e)
    if state.role == DECODE_ONLY:
        request.num_computed = request.num_prefill
        request.num_generated = 1
        request.num_emitted = 1
    else:
        _hold_nothing(request)
    request.is_on_engine = 1
    push_arrived(state, e, r)
    wake(state, e, now_ns)
    state.next_ns = min(state.next_ns, units_of(state)[engines_of(state)[e].unit].next_ns)


@compiled
def reserve(states: Records, e: int, r: int) -> bool:
    """Take the blocks of a prompt and one token more, if free; there is a slot."""
    state = states[0]
    request = requests_of(state)[r]
    _hold_nothing(request)
    count = num_blocks_of(state, request.num_prefill + 1)
    if count > engines_of(state)[e].num_free:
        return False
    units_of(state)[engines_of(state)[e].unit].is_steady = 0
    request.engine = e
    take_slot(state, e, r)
    take_blocks(state, e, r, count)
    return True


@compiled
def release(states: Records, r: int, now_ns: int) -> None:
    """Free the blocks that a request holds; an idle engine ticks now."""
    state = states[0]
    e = requests_of(state)[r].engine
    free_blocks(state, e, r)
    units_of(state)[engines_of(state)[e].unit].is_steady = 0
    wake(state, e, now_ns)
    state.next_ns = min(state.next_ns, units_of(state)[engines_of(state)[e].unit].next_ns)


@compiled_part
def _begin(request: Any, e: int) -> None:
    """Begin a request anew; what is counted goes on."""
    request.engine = e
    request.attempt += 1
    request.num_computed = 0
    request.num_generated = 0
    request.num_emitted = 0
    request.num_draft = 0
    request.is_swapped = 0
    request.loaded_ns = NONE
    request.run_count = 0
    request.queued_ns = NONE
    request.scheduled_ns = NONE
    request.first_token_ns = NONE
    request.finished_ns = NONE
    request.outcome = 0


@compiled_part
def _hold_nothing(request: Any) -> None:
    request.num_blocks = 0
    request.num_named = 0
    request.chain_key = 0
    request.slot = NONE
