"""Arrivals, lengths, sessions and content as a trace has them; see `trace_file` for files.

Options: `concurrency` and what else a closed loop has (`closed_loop.py`) replay it as one: in the
order of the trace, not at its times. `session_rate_rps` lets sessions begin at that rate instead,
as a Poisson process in the order of the trace; a request of no session is one of its own.
`max_think_s` cuts times to think.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.domain.units import MAX_COUNT
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.workload.request_plan import (
    LOOP_OPTIONS,
    NONE,
    ClosedLoop,
    RequestDraft,
    check_options,
    fill_rows,
    find_previous_turns,
    find_sessions,
    option_error,
    read_loop,
    read_number,
)
from foretoken.simulator.workload.rng import named_stream


def _replay(spec: WorkloadSpec, seed: int) -> RequestDraft:
    options = spec.arrival_options
    check_options(spec, (*LOOP_OPTIONS, "session_rate_rps", "max_think_s"))
    _check_spec(spec)
    is_loop = not options.keys().isdisjoint(LOOP_OPTIONS)
    loop = read_loop(spec) if is_loop else ClosedLoop()
    if is_loop and "session_rate_rps" in options:
        raise option_error("session_rate_rps", "a closed loop begins sessions by itself")
    requests = spec.trace_requests
    arrival_s = _read_floats(requests, "arrival_s", lambda request: request.arrival_s)
    prompts = _read_ints(requests, "num_prefill_tokens", lambda r: r.num_prefill_tokens, 1)
    answers = _read_ints(requests, "num_decode_tokens", lambda r: r.num_decode_tokens, 1)
    session = _read_ints(requests, "session", lambda request: request.session, 0)
    session = np.where(session == 0, NONE, session)
    previous = find_previous_turns(session)
    num_hashes = _read_ints(requests, "block_hashes", lambda r: len(r.block_hashes), 0)
    _check_hashes(spec, num_hashes, prompts)
    names = [request.block_hashes for request in requests]
    if num_hashes.any():
        _name_answers(names, (prompts, answers, previous), spec.hash_block_tokens)
        num_hashes = np.fromiter(map(len, names), np.int64, len(names))
    class_index, class_names = _index_classes(requests)
    joins = _find_joins(requests)
    arrival_s = _order_arrivals(_order_turns(arrival_s, session), previous, joins)
    if "session_rate_rps" in options:
        arrival_s = _begin_sessions(spec, seed, arrival_s, find_sessions(previous, joins))
    think_s = _read_floats(requests, "think_s", lambda request: request.think_s)
    return RequestDraft(
        arrival_s=arrival_s,
        num_prefill_tokens=prompts,
        num_decode_tokens=answers,
        session=session,
        think_s=np.minimum(think_s, read_number(spec, "max_think_s", np.inf, can_be_zero=True)),
        stream=_share_streams(prompts, answers, previous),
        prefix_stream=fill_rows(len(requests), NONE),
        prefix_tokens=fill_rows(len(requests), 0),
        num_hashes=num_hashes,
        hashes=_join_hashes(names, int(num_hashes.sum())),
        class_index=class_index,
        class_names=class_names,
        hash_block_tokens=spec.hash_block_tokens if num_hashes.any() else 0,
        joins=joins,
        **loop._asdict(),
    )


def _check_spec(spec: WorkloadSpec) -> None:
    if spec.sessions is not None:
        raise InvalidRequestError.of_field(
            "workload.sessions", "a trace brings its own sessions, in its requests"
        )
    if not spec.trace_requests:
        # A path means a file of the client's: only the client can open it.
        problem = f"{spec.trace_path} was not loaded" if spec.trace_path else "a trace needs a file"
        raise InvalidRequestError.of_field("workload.trace_path", problem)


def _read_ints(
    requests: Sequence[Request], name: str, read: Callable[[Request], int], minimum: int
) -> Ints:
    try:
        column = np.fromiter(map(read, requests), np.int64, len(requests))
    except OverflowError as err:
        raise InvalidRequestError.of_field("workload.trace_requests", f"{name}: {err}") from err
    _check_column(name, column >= minimum, f"must be at least {minimum}")
    if minimum:
        _check_column(name, column <= MAX_COUNT, f"must be at most {MAX_COUNT}")
    return column


def _read_floats(
    requests: Sequence[Request], name: str, read: Callable[[Request], float]
) -> Floats:
    column = np.fromiter(map(read, requests), np.float64, len(requests))
    _check_column(name, np.isfinite(column) & (column >= 0), "must be a number of at least 0")
    return column


def _check_column(name: str, is_legal: np.ndarray, problem: str) -> None:
    if not is_legal.all():
        index = int(np.argmin(is_legal))
        raise InvalidRequestError.of_field(f"workload.trace_requests[{index}].{name}", problem)


def _check_hashes(spec: WorkloadSpec, num_hashes: Ints, prompts: Ints) -> None:
    if not num_hashes.any():
        return
    if spec.hash_block_tokens == 0:
        raise InvalidRequestError.of_field(
            "workload.hash_block_tokens", "must say how many tokens a block hash stands for"
        )
    _check_column(
        "block_hashes",
        num_hashes <= -(-prompts // spec.hash_block_tokens),
        f"are more than the prompt's blocks of {spec.hash_block_tokens} tokens",
    )


def _order_turns(arrival_s: Floats, session: Ints) -> Floats:
    """Return times that do not fall within a session: a turn is not before the one before it."""
    rows = np.flatnonzero(session != NONE)
    if len(rows) == 0:
        return arrival_s
    rows = rows[np.argsort(session[rows], kind="stable")]
    # A running maximum over (session, rank of the time): sessions ascend, so none leaks.
    times, rank = np.unique(arrival_s[rows], return_inverse=True)
    _, index = np.unique(session[rows], return_inverse=True)
    latest = np.maximum.accumulate(index * len(times) + rank) % len(times)
    ordered = arrival_s.copy()
    ordered[rows] = times[latest]
    return ordered


def _find_joins(requests: Sequence[Request]) -> Ints | None:
    """Return a row for each request and one it comes after; None where no request names any."""
    rows = [(place, before) for place, request in enumerate(requests) for before in request.after]
    if not rows:
        return None
    joins = np.array(rows, dtype=np.int64)
    is_legal = (joins[:, 1] >= 0) & (joins[:, 1] < joins[:, 0])
    if not is_legal.all():
        place, before = joins[int(np.argmin(is_legal))].tolist()
        raise InvalidRequestError.of_field(
            f"workload.trace_requests[{place}].after",
            f"{before} is not the place of an earlier one",
        )
    return joins


def _order_arrivals(arrival_s: Floats, previous: Ints, joins: Ints | None) -> Floats:
    """Return times of which none is before that of a request it comes after."""
    if joins is None:
        return arrival_s
    ordered = arrival_s.tolist()
    befores: list[list[int]] = [[] if turn == NONE else [turn] for turn in previous.tolist()]
    for place, before in joins.tolist():
        befores[place].append(before)
    for place, earlier in enumerate(befores):
        ordered[place] = max([ordered[place], *(ordered[before] for before in earlier)])
    return np.array(ordered)


def _begin_sessions(spec: WorkloadSpec, seed: int, arrival_s: Floats, session: Ints) -> Floats:
    """Return times of which each session's first is that of a Poisson process."""
    rate_rps = read_number(spec, "session_rate_rps", 1.0)
    firsts = np.unique(session)
    gaps_s = named_stream(seed, "arrivals").exponential(1.0 / rate_rps, len(firsts))
    begin_s = np.zeros(len(session))
    begin_s[firsts] = np.cumsum(gaps_s)
    # The first of a session in the trace need not be the first to arrive.
    earliest_s = np.full(len(session), np.inf)
    np.minimum.at(earliest_s, session, arrival_s)
    moved_s: Floats = begin_s[session] + arrival_s - earliest_s[session]
    return moved_s


def _share_streams(prompts: Ints, answers: Ints, previous: Ints) -> Ints:
    """Return names of content: a turn shares its session's if its prompt can hold the turns before.

    One that is shorter began anew, or was recorded without its history.
    """
    stream = np.arange(len(prompts), dtype=np.int64)
    later = np.flatnonzero(previous != NONE)
    before = previous[later]
    continued = later[prompts[later] >= prompts[before] + answers[before]]
    # Turns point at the one before; following the pointers doubles their reach each time.
    stream[continued] = previous[continued]
    while (stream[stream] != stream).any():
        stream = stream[stream]
    return stream


def _name_answers(
    names: list[tuple[int, ...]], columns: tuple[Ints, Ints, Ints], block_tokens: int
) -> None:
    """Let the prompt of a turn name the answer before it, which it holds.

    `columns` are the prompts, the answers and the previous turns.
    """
    prompts, answers, previous = columns
    for turn in np.flatnonzero(previous != NONE):
        before = previous[turn]
        num_known = prompts[before] + answers[before]
        whole = prompts[before] // block_tokens
        is_continued = names[turn][:whole] == names[before][:whole]
        if is_continued and len(names[turn]) > whole and prompts[turn] >= num_known:
            names[before] = names[turn][: num_known // block_tokens] or names[before]


def _join_hashes(names: Sequence[tuple[int, ...]], num_hashes: int) -> Ints:
    try:
        return np.fromiter(chain.from_iterable(names), np.int64, num_hashes)
    except OverflowError as err:
        raise InvalidRequestError.of_field(
            "workload.trace_requests", f"block_hashes must fit into 64 bits: {err}"
        ) from err


def _index_classes(requests: Sequence[Request]) -> tuple[Ints, tuple[str, ...]]:
    index = {"": NONE}
    for name in sorted({request.slo_class for request in requests} - {""}):
        index[name] = len(index) - 1
    column = np.fromiter((index[r.slo_class] for r in requests), np.int64, len(requests))
    return column, tuple(index)[1:]


ARRIVAL = _replay
