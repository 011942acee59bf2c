"""What waits at an engine in order of priority: a merge sort of a list that is nearly in order."""

from foretoken.simulator.engine.layout import NONE, State
from foretoken.simulator.engine.view import engines_of, requests_of
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
    while following != NONE and _is_before(state, r, following):
        r = following
        following = int(requests_of(state)[r].next)
    requests_of(state)[r].next = NONE
    return following


@compiled_part
def _merge(state: State, first: int, second: int) -> int:
    """Return one list of two that are in order."""
    if _is_before(state, second, first):
        first, second = second, first
    last, following = first, int(requests_of(state)[first].next)
    while following != NONE:
        if _is_before(state, second, following):
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
def _is_before(state: State, r: int, other: int) -> bool:
    mine, others = requests_of(state)[r].priority, requests_of(state)[other].priority
    return bool(mine > others or (mine == others and r < other))
