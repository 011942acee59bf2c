"""How engines in lock step share new requests, where they deal them before every step.

Of all that arrived as many are dealt as may run; the longest prompt first, to the engine whose
requests have the fewest tokens in their prompts, of equals to that with the fewest, then the first.
None gets more than as many as each would have if all had as many.
Source: TensorRT-LLM 1.x, _torch/pyexecutor/executor_request_queue.py
(`_schedule_attention_dp_requests`, `_balance_requests_across_ranks`).
"""

from foretoken.simulator.engine.layout import NONE, State
from foretoken.simulator.engine.queue import deal_to, pop_arrived
from foretoken.simulator.engine.view import engines_of, requests_of, running_of, units_of
from foretoken.simulator.jit import compiled_part


@compiled_part
def deal_arrivals(state: State, u: int, now_ns: int) -> None:
    """Let engines have what arrived, as long as they have room."""
    unit = units_of(state)[u]
    first, last = unit.first_engine, unit.first_engine + unit.num_engines
    num_active, most = 0, 0
    for e in range(first, last):
        num_own = _num_active(state, e)
        num_active += num_own
        most = max(most, num_own)
    room = unit.num_engines * state.max_num_seqs - num_active
    num_new = min(engines_of(state)[first].num_arrived, room)
    share = max(-(-(num_active + num_new) // unit.num_engines), most)
    head = _take(state, first, num_new)
    while head != NONE:
        before = _before_longest(state, head)
        r = head if before == NONE else int(requests_of(state)[before].next)
        following = int(requests_of(state)[r].next)
        if before == NONE:
            head = following
        else:
            requests_of(state)[before].next = following
        deal_to(state, _least_loaded(state, u, share), r, now_ns)


@compiled_part
def _num_active(state: State, e: int) -> int:
    engine = engines_of(state)[e]
    return int(engine.num_running + engine.num_waiting)


@compiled_part
def _take(state: State, e: int, count: int) -> int:
    """Return a list of the first that arrived."""
    head, tail = NONE, NONE
    for _ in range(count):
        r = pop_arrived(state, e)
        requests_of(state)[r].next = NONE
        if head == NONE:
            head = r
        else:
            requests_of(state)[tail].next = r
        tail = r
    return head


@compiled_part
def _before_longest(state: State, head: int) -> int:
    """Return which request of a list the first of its longest comes after; none: it is the head."""
    found, longest = NONE, requests_of(state)[head].num_prefill
    before, r = head, int(requests_of(state)[head].next)
    while r != NONE:
        if requests_of(state)[r].num_prefill > longest:
            found, longest = before, requests_of(state)[r].num_prefill
        before, r = r, int(requests_of(state)[r].next)
    return found


@compiled_part
def _least_loaded(state: State, u: int, share: int) -> int:
    """Return the engine whose requests have the fewest tokens, of those with less than a share."""
    unit = units_of(state)[u]
    best, best_tokens, best_count = int(unit.first_engine), -1, 0
    for e in range(unit.first_engine, unit.first_engine + unit.num_engines):
        count = _num_active(state, e)
        if count >= share:
            continue
        num_tokens = _num_tokens(state, e)
        is_less = num_tokens < best_tokens or (num_tokens == best_tokens and count < best_count)
        if best_tokens < 0 or is_less:
            best, best_tokens, best_count = e, num_tokens, count
    return best


@compiled_part
def _num_tokens(state: State, e: int) -> int:
    """Return the tokens of the prompts of an engine's requests."""
    num_tokens = 0
    for index in range(engines_of(state)[e].num_running):
        num_tokens += requests_of(state)[running_of(state)[e, index]].num_prefill
    r = int(engines_of(state)[e].first_waiting)
    while r != NONE:
        num_tokens += requests_of(state)[r].num_prefill
        r = int(requests_of(state)[r].next)
    return int(num_tokens)
