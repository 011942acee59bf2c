"""The queue of an engine: by priority, by readiness, and in the order of arrival."""

from collections.abc import Callable

from foretoken.simulator.engine.layout import (
    DECODE_ONLY,
    IDLE,
    NEVER_NS,
    NONE,
    TICK,
    State,
)
from foretoken.simulator.engine.view import (
    engines_of,
    heap_of,
    ready_order_of,
    requests_of,
    running_of,
    units_of,
)
from foretoken.simulator.jit import compiled_part


@compiled_part
def rank_waiting(state: State, e: int) -> None:
    """Sort what waits: the highest priority first, of equal ones the first of the plan."""
    engine = engines_of(state)[e]
    engine.is_ranked = 1
    num_runs = 2
    while num_runs > 1:
        rest = int(engine.first_waiting)
        engine.first_waiting = engine.last_waiting = NONE
        num_runs = 0
        while rest != NONE:
            first = rest
            rest = _cut_run(state, first)
            if rest != NONE:
                second = rest
                rest = _cut_run(state, second)
                first = _merge(state, first, second)
            _append(state, e, first)
            num_runs += 1


@compiled_part
def _cut_run(state: State, r: int) -> int:
    """End a list where its order ends; return what comes after."""
    following = int(requests_of(state)[r].next)
    while following != NONE and _goes_first(state, r, following):
        r = following
        following = int(requests_of(state)[r].next)
    requests_of(state)[r].next = NONE
    return following


@compiled_part
def _merge(state: State, first: int, second: int) -> int:
    """Return one list of two that are in order."""
    if _goes_first(state, second, first):
        first, second = second, first
    last, following = first, int(requests_of(state)[first].next)
    while following != NONE:
        if _goes_first(state, second, following):
            following, second = second, following
        requests_of(state)[last].next = following
        last = following
        following = int(requests_of(state)[last].next)
    requests_of(state)[last].next = second
    return first


@compiled_part
def _append(state: State, e: int, r: int) -> None:
    """Put a list behind what waits."""
    engine = engines_of(state)[e]
    if engine.first_waiting == NONE:
        engine.first_waiting = r
    else:
        requests_of(state)[engine.last_waiting].next = r
    last = r
    while requests_of(state)[last].next != NONE:
        last = int(requests_of(state)[last].next)
    engine.last_waiting = last


@compiled_part
def _goes_first(state: State, r: int, other: int) -> bool:
    mine, others = requests_of(state)[r].priority, requests_of(state)[other].priority
    return bool(mine > others or (mine == others and r < other))


def _queue_of(name: str) -> tuple[Callable[[State, int, int], None], Callable[[State, int], int]]:
    """Return what puts a request behind a list of an engine, and what takes its first."""
    first, last, count = f"first_{name}", f"last_{name}", f"num_{name}"

    def push(state: State, e: int, r: int) -> None:
        engine = engines_of(state)[e]
        requests_of(state)[r].next = NONE
        if engine[count] == 0:
            engine[first] = r
        else:
            requests_of(state)[engine[last]].next = r
        engine[last] = r
        engine[count] += 1

    def pop(state: State, e: int) -> int:
        engine = engines_of(state)[e]
        r = engine[first]
        engine[first] = requests_of(state)[r].next
        engine[count] -= 1
        if engine[count] == 0:
            engine[last] = NONE
        return int(r)

    return compiled_part(push), compiled_part(pop)


_push_waiting, _pop_waiting = _queue_of("waiting")
_push_arrived, pop_arrived = _queue_of("arrived")
# Computed elsewhere and with their blocks here.
_push_transferred_in, _pop_transferred_in = _queue_of("transferred_in")


@compiled_part
def pop_waiting(state: State, e: int) -> int:
    """Take the first waiting request."""
    r = _pop_waiting(state, e)
    engines_of(state)[e].num_waiting_tokens -= _prompt_tokens(state, r)
    return r


@compiled_part
def push_waiting_first(state: State, e: int, r: int) -> None:
    """Let a request wait before all others."""
    engine = engines_of(state)[e]
    requests_of(state)[r].next = engine.first_waiting
    engine.first_waiting = r
    if engine.last_waiting == NONE:
        engine.last_waiting = r
    engine.num_waiting += 1
    engine.is_ranked = 0
    engine.num_waiting_tokens += _prompt_tokens(state, r)


@compiled_part
def push_waiting(state: State, e: int, r: int) -> None:
    """Let a request wait behind all others."""
    _push_waiting(state, e, r)
    engine = engines_of(state)[e]
    engine.is_ranked = 0
    engine.num_waiting_tokens += _prompt_tokens(state, r)


@compiled_part
def _prompt_tokens(state: State, r: int) -> int:
    """Return the tokens of a waiting request's prompt; of none that came with its blocks here."""
    request = requests_of(state)[r]
    if state.role == DECODE_ONLY and request.num_computed > 0:
        return 0
    return int(request.num_prefill)


@compiled_part
def push_arrived(state: State, e: int, r: int) -> None:
    """Leave a request at an engine, which sees it when it ticks."""
    _push_arrived(state, e, r)
    if state.role != DECODE_ONLY:
        engines_of(state)[e].num_waiting_tokens += requests_of(state)[r].num_prefill


@compiled_part
def deals(state: State, u: int) -> bool:
    """Whether new requests wait at the first engine of a unit for all of them to share."""
    is_shared = units_of(state)[u].num_engines > 1 and state.role != DECODE_ONLY
    return bool(state.deals_requests and is_shared)


@compiled_part
def place_of_arrival(state: State, e: int) -> int:
    """Return where a request for an engine waits to be seen."""
    u = engines_of(state)[e].unit
    return int(units_of(state)[u].first_engine) if deals(state, u) else e


@compiled_part
def deal_to(state: State, e: int, r: int, now_ns: int) -> None:
    """Let a request that arrived at the first of several engines wait at one of them."""
    request = requests_of(state)[r]
    engines_of(state)[request.engine].num_waiting_tokens -= request.num_prefill
    request.engine = e
    request.queued_ns = now_ns
    push_waiting(state, e, r)


@compiled_part
def admit_arrivals(state: State, e: int, now_ns: int) -> None:
    """Let the requests that have arrived wait, by priority, or run if their blocks are here."""
    engine = engines_of(state)[e]
    is_dealing = deals(state, engine.unit)
    while engine.num_arrived > 0 and not is_dealing:
        r = pop_arrived(state, e)
        requests_of(state)[r].queued_ns = now_ns
        if state.role == DECODE_ONLY:
            _push_transferred_in(state, e, r)
        else:
            engine.num_waiting_tokens -= requests_of(state)[r].num_prefill
            push_waiting(state, e, r)
    if state.has_priorities and not engine.is_ranked:
        rank_waiting(state, e)
    seat_transferred_in(state, e)


@compiled_part
def seat_transferred_in(state: State, e: int) -> None:
    """Let requests whose blocks are here run, as long as there are seats."""
    engine = engines_of(state)[e]
    while engine.num_transferred_in > 0 and engine.num_running < state.max_num_seqs:
        running_of(state)[e, engine.num_running] = _pop_transferred_in(state, e)
        engine.num_running += 1


@compiled_part
def wake(state: State, e: int, now_ns: int) -> None:
    """Let the unit of an engine tick now if it is idle."""
    unit = units_of(state)[engines_of(state)[e].unit]
    if unit.tick == IDLE:
        unit.tick = TICK
        unit.next_ns = now_ns


@compiled_part
def next_ready_ns(state: State) -> int:
    """Return when the next request reaches the engines, as far as is known."""
    ready_ns = NEVER_NS
    if state.num_heap > 0:
        ready_ns = requests_of(state)[heap_of(state)[0]].ready_ns
    if state.num_ready < state.num_open:
        r = ready_order_of(state)[state.num_ready]
        ready_ns = min(ready_ns, requests_of(state)[r].ready_ns)
    return ready_ns


@compiled_part
def pop_ready(state: State) -> int:
    """Take the next request that reaches the engines; of one instant the lowest number."""
    if state.num_ready < state.num_open:
        r = ready_order_of(state)[state.num_ready]
        if state.num_heap == 0 or _is_before(state, r, heap_of(state)[0]):
            state.num_ready += 1
            return int(r)
    return _pop_heap(state)


@compiled_part
def push_ready(state: State, r: int) -> None:
    """Let a request reach the engines at its `ready_ns`."""
    heap = heap_of(state)
    place = state.num_heap
    state.num_heap += 1
    while place > 0:
        parent = (place - 1) // 2
        if not _is_before(state, r, heap[parent]):
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = r


@compiled_part
def _pop_heap(state: State) -> int:
    heap = heap_of(state)
    top = heap[0]
    state.num_heap -= 1
    r, count, place = heap[state.num_heap], state.num_heap, 0
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and _is_before(state, heap[child + 1], heap[child]):
            child += 1
        if not _is_before(state, heap[child], r):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = r
    return int(top)


@compiled_part
def _is_before(state: State, r: int, other: int) -> bool:
    mine, theirs = requests_of(state)[r].ready_ns, requests_of(state)[other].ready_ns
    return bool(mine < theirs or (mine == theirs and r < other))
