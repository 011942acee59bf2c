"""How requests come and go: arrival, routing, output tokens, the end."""

from foretoken.simulator.engine.batch import num_kv_tokens_max
from foretoken.simulator.engine.block import free_blocks, num_blocks_of
from foretoken.simulator.engine.front_end import pass_front_end
from foretoken.simulator.engine.layout import (
    DEPLOYMENT,
    LEAST_LOADED,
    PREFILL_ONLY,
    State,
    as_int64,
)
from foretoken.simulator.engine.queue import place_of_arrival, push_arrived, push_ready, wake
from foretoken.simulator.engine.view import (
    ended_of,
    engines_of,
    followers_of,
    ready_order_of,
    requests_of,
    runs_of,
    session_left_of,
    units_of,
)
from foretoken.simulator.jit import compiled_part
from foretoken.simulator.serving.record import RequestOutcome

_pass_front_end = compiled_part(pass_front_end)
_COMPLETED = int(RequestOutcome.COMPLETED)
_CONTEXT_TOO_LONG = int(RequestOutcome.CONTEXT_TOO_LONG)
_EXCEEDS_KV_CACHE = int(RequestOutcome.EXCEEDS_KV_CACHE)
# What a waiting request weighs, compared with a running one. Source: vLLM's data-parallel
# balancing.
_WAITING_WEIGHT = 4


@compiled_part
def send(state: State, r: int, now_ns: int) -> None:
    """Let a client send a request now, or at its earliest if that is later."""
    request = requests_of(state)[r]
    request.arrival_ns = max(now_ns, request.earliest_ns)
    request.ready_ns = request.arrival_ns


@compiled_part
def enter(state: State, r: int, now_ns: int) -> None:
    """Let a request that has arrived through a front end, and then to an engine."""
    request = requests_of(state)[r]
    if not request.is_at_front_end:
        request.is_at_front_end = 1
        request.ready_ns = _find_through_ns(state, as_int64(request.num_prefill), now_ns)
        if request.ready_ns > now_ns:
            push_ready(state, r)
            return
    _route(state, r, now_ns)


@compiled_part
def _find_through_ns(state: State, num_tokens: int, now_ns: int) -> int:
    """Return when a request is through a front end, the first to be free of all units'."""
    first = units_of(state)[0]
    for u in range(1, state.num_units):
        unit = units_of(state)[u]
        is_first = unit.tokenizer_free_ns < first.tokenizer_free_ns
        is_equal = unit.tokenizer_free_ns == first.tokenizer_free_ns
        if is_first or (is_equal and unit.executor_free_ns < first.executor_free_ns):
            first = unit
    free_ns = (first.tokenizer_free_ns, first.executor_free_ns)
    first.tokenizer_free_ns, first.executor_free_ns, through_ns = _pass_front_end(
        state, num_tokens, now_ns, free_ns
    )
    return int(through_ns)


@compiled_part
def _route(state: State, r: int, now_ns: int) -> None:
    """Give a request that is ready to an engine, or refuse it."""
    request = requests_of(state)[r]
    num_tokens = as_int64(request.num_prefill) + request.num_decode
    if num_tokens > state.max_context:
        refuse(state, r, now_ns, _CONTEXT_TOO_LONG)
    elif num_blocks_of(state, num_kv_tokens_max(state, r)) > state.num_blocks:
        refuse(state, r, now_ns, _EXCEEDS_KV_CACHE)
    else:
        e = _choose_engine(state)
        e = place_of_arrival(state, e)
        request.engine = e
        push_arrived(state, e, r)
        wake(state, e, now_ns)


@compiled_part
def _choose_engine(state: State) -> int:
    engines = engines_of(state)
    if state.router == LEAST_LOADED:
        best, best_load = 0, -1
        for e in range(state.num_engines):
            num_waiting = engines[e].num_arrived + engines[e].num_waiting
            load = _WAITING_WEIGHT * num_waiting + engines[e].num_running
            if best_load < 0 or load < best_load:
                best, best_load = e, load
        return best
    chosen = state.round_robin
    state.round_robin = (chosen + 1) % state.num_engines
    return int(chosen)


@compiled_part
def refuse(state: State, r: int, now_ns: int, outcome: int) -> None:
    """End a request that cannot be served."""
    requests_of(state)[r].outcome = outcome
    end_run(state, r)
    _let_others_arrive(state, r, now_ns)


@compiled_part
def refuse_unfit(state: State, r: int, now_ns: int) -> None:
    """End a request for which there will never be room."""
    refuse(state, r, now_ns, _EXCEEDS_KV_CACHE)


@compiled_part
def emit(state: State, r: int, step: int, count: int) -> None:
    """Note output tokens that leave at the ends of that many steps from `step` on."""
    request = requests_of(state)[r]
    request.num_emitted += count
    gap = step - request.run_last
    if request.run_count == 1 and gap <= state.num_stages:
        request.run_stride = gap
    if request.run_count > 0 and gap == request.run_stride:
        request.run_count += count
    else:
        end_run(state, r)
        request.run_first = step
        request.run_stride = 1
        request.run_count = count
    request.run_last = step + count - 1


@compiled_part
def emit_together(state: State, r: int, step: int, count: int) -> None:
    """Note several output tokens that leave at the end of one step."""
    request = requests_of(state)[r]
    request.num_emitted += count
    end_run(state, r)
    request.run_first = request.run_last = step
    request.run_stride = 0
    request.run_count = count


@compiled_part
def end_run(state: State, r: int) -> None:
    """Write down the evenly spaced steps in which a request got tokens."""
    request = requests_of(state)[r]
    if request.run_count == 0:
        return
    place = state.num_out_runs
    state.num_out_runs = place + 1
    runs_of(state)[place, 0] = r
    runs_of(state)[place, 1] = request.run_first
    runs_of(state)[place, 2] = request.run_stride
    runs_of(state)[place, 3] = request.run_count
    runs_of(state)[place, 4] = request.engine
    runs_of(state)[place, 5] = request.attempt
    request.run_count = 0


@compiled_part
def finish(state: State, e: int, r: int, now_ns: int) -> None:
    """End a request that has all its tokens; it stays in `running` until that is cleared."""
    request = requests_of(state)[r]
    request.finished_ns = now_ns
    request.outcome = _COMPLETED
    end_run(state, r)
    if state.role != PREFILL_ONLY:
        free_blocks(state, e, r)
    _let_others_arrive(state, r, now_ns)


@compiled_part
def _let_others_arrive(state: State, r: int, now_ns: int) -> None:
    """Send the requests that waited for this one last, or the next session of a closed loop.

    A pool knows none.
    """
    request = requests_of(state)[r]
    state.num_done += 1
    if state.role != DEPLOYMENT:
        request.is_on_engine = 0
        ended_of(state)[state.num_ended] = r
        state.num_ended += 1
        return
    first = as_int64(request.first_follower)
    for place in range(first, first + request.num_followers):
        follower = as_int64(followers_of(state)[place])
        requests_of(state)[follower].num_awaited -= 1
        if requests_of(state)[follower].num_awaited == 0:
            _send_after(state, follower, now_ns)
    if state.is_closed_loop:
        session_left_of(state)[request.session] -= 1
        if session_left_of(state)[request.session] == 0:
            _begin_session(state, now_ns)


@compiled_part
def _begin_session(state: State, now_ns: int) -> None:
    """Send what waits for none of the next session of a closed loop, if there is one."""
    place = state.num_released
    while place < state.num_unfollowing:
        r = as_int64(ready_order_of(state)[place])
        first = ready_order_of(state)[state.num_released]
        if requests_of(state)[r].session != requests_of(state)[first].session:
            break
        _send_after(state, r, now_ns)
        place += 1
    state.num_released = place


@compiled_part
def _send_after(state: State, r: int, now_ns: int) -> None:
    send(state, r, now_ns + requests_of(state)[r].think_ns)
    push_ready(state, r)
