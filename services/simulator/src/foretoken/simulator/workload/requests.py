"""Turn a workload specification into a plan: lengths, sessions, prefixes, times of arrival."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.slo import SloClass
from foretoken.domain.requests.workload import LengthSpec, SessionSpec, WorkloadSpec
from foretoken.domain.units import MAX_COUNT
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.workload.request_plan import (
    NONE,
    ArrivalProcess,
    RequestDraft,
    RequestPlan,
    fill_rows,
    find_first,
    find_previous_turns,
    find_sessions,
)
from foretoken.simulator.workload.rng import named_stream

# What a length plug-in is: (specification, how many, random stream) -> whole numbers of at least 1.
# It raises InvalidRequestError with the field of the specification that cannot be used.
LengthDistribution = Callable[[LengthSpec, int, np.random.Generator], Ints]
# Times of so many arrivals, in s, ascending.
PlaceArrivals = Callable[[int, np.random.Generator], Floats]

T = TypeVar("T")


def draw_requests(spec: WorkloadSpec, seed: int, place: PlaceArrivals) -> RequestDraft:
    """Return the requests of a synthetic workload; `place` places what begins a session.

    Raises:
        InvalidRequestError: the lengths cannot be drawn, or a trace was given as well.

    """
    if spec.trace_requests or spec.trace_path:
        raise InvalidRequestError.of_field(
            "workload.arrival", f"{spec.arrival} draws its own requests; a trace needs `trace`"
        )
    sessions = spec.sessions or SessionSpec()
    session = _draw_sessions(sessions, spec.num_requests, seed)
    previous = find_previous_turns(session)
    num_sessions = int(session[-1]) + 1
    asked = draw_lengths(spec.prefill, spec.num_requests, named_stream(seed, "prefill"), "prefill")
    answered = draw_lengths(spec.decode, spec.num_requests, named_stream(seed, "decode"), "decode")
    prefix = _assign_prefixes(sessions, num_sessions, seed)
    think_s = named_stream(seed, "think").exponential(1.0, spec.num_requests) * sessions.think_s
    return RequestDraft(
        arrival_s=place(num_sessions, named_stream(seed, "arrivals"))[session],
        num_prefill_tokens=_count_prompts(asked, answered, previous)
        + sessions.shared_prefix_tokens,
        num_decode_tokens=answered,
        session=session,
        think_s=np.where(previous == NONE, 0.0, think_s),
        stream=session,
        # Names of prefixes lie beyond those of sessions: equal names would be equal content.
        prefix_stream=np.where(prefix == NONE, NONE, num_sessions + prefix)[session],
        prefix_tokens=fill_rows(spec.num_requests, sessions.shared_prefix_tokens),
        num_hashes=fill_rows(spec.num_requests, 0),
        hashes=fill_rows(0, 0),
        class_index=fill_rows(spec.num_requests, NONE),
    )


def draw_lengths(
    spec: LengthSpec, num_lengths: int, stream: np.random.Generator, name: str
) -> Ints:
    """Return lengths, capped at the specification's maximum; `name` is its place in the workload.

    Raises:
        InvalidRequestError: an unknown kind, or numbers that make no distribution.

    """
    try:
        kinds = scan_modules("foretoken.simulator.workload.lengths", "LENGTH")
        distribution: LengthDistribution = _look_up(spec.kind, kinds)
        _check_bounds(spec)
        lengths = distribution(spec, num_lengths, stream)
    except InvalidRequestError as err:
        raise InvalidRequestError.of_violations(
            FieldViolation(f"workload.{name}.{v.field}", v.description) for v in err.violations
        ) from err
    return np.minimum(lengths, spec.maximum or MAX_COUNT).astype(np.int64)


def _look_up(kind: str, known: Mapping[str, T]) -> T:
    if kind not in known:
        raise InvalidRequestError.of_field("kind", f"{kind!r} is not one of {', '.join(known)}")
    return known[kind]


def _check_bounds(spec: LengthSpec) -> None:
    longest = max(spec.mean, spec.minimum, spec.maximum, *spec.values, 0)
    if longest > MAX_COUNT:
        raise InvalidRequestError.of_field("maximum", f"{longest} is beyond {MAX_COUNT} tokens")
    if spec.maximum and spec.minimum > spec.maximum:
        raise InvalidRequestError.of_field(
            "minimum", f"must not be above maximum, found {spec.minimum} and {spec.maximum}"
        )


def _draw_sessions(sessions: SessionSpec, num_requests: int, seed: int) -> Ints:
    """Return the session of each request; the last session is cut to make the count exact."""
    turns = draw_lengths(
        sessions.turns, num_requests, named_stream(seed, "turns"), "sessions.turns"
    )
    turns = np.minimum(turns, num_requests)
    num_sessions = int(np.searchsorted(np.cumsum(turns), num_requests)) + 1
    return np.repeat(np.arange(num_sessions), turns[:num_sessions])[:num_requests]


def _count_prompts(asked: Ints, answered: Ints, previous: Ints) -> Ints:
    """Return prompts that hold the turns before; entries of a session follow each other."""
    turns = asked + answered
    before = np.cumsum(turns) - turns
    is_first = previous == NONE
    start = np.maximum.accumulate(np.where(is_first, np.arange(len(asked)), 0))
    prompts: Ints = before - before[start] + asked
    return prompts


def _assign_prefixes(sessions: SessionSpec, num_sessions: int, seed: int) -> Ints:
    """Return the shared prefix of each session: each as often, in an order no router can follow."""
    if sessions.shared_prefix_tokens == 0:
        return fill_rows(num_sessions, NONE)
    evenly = np.arange(num_sessions) % sessions.num_shared_prefixes
    return named_stream(seed, "prefixes").permutation(evenly)


_NS_PER_S = 1e9

# Half of what an int64 of ns can hold, 146 years: the other half is for the simulation.
_MAX_S = 2**62 / _NS_PER_S

# One token of prompt and one of answer.
_MIN_TOKENS = 2


def resolve_workload(spec: WorkloadSpec, slo_classes: Sequence[SloClass], seed: int) -> RequestPlan:
    """Return the requests of a workload in order of arrival, cut to its token limit.

    The same seed gives the same plan; what one part of the workload draws does not depend on what
    the others are.

    Raises:
        UnknownPluginError: no arrival process of that name.
        InvalidRequestError: lengths, options, classes or the trace cannot be used.

    """
    if spec.max_tokens_per_request and spec.max_tokens_per_request < _MIN_TOKENS:
        raise InvalidRequestError.of_field(
            "workload.max_tokens_per_request", f"must be at least {_MIN_TOKENS}, or 0 for no limit"
        )
    processes = scan_modules("foretoken.simulator.workload.arrivals", "ARRIVAL")
    process: ArrivalProcess = UnknownPluginError.look_up(spec.arrival, processes)
    draft = process(spec, seed)
    classes = _assign_classes(draft, slo_classes, seed)
    rows = _select_rows(spec, draft.arrival_s)
    return _build_plan(spec, draft, rows, _rank_classes(classes[rows], slo_classes))


def _select_rows(spec: WorkloadSpec, arrival_s: Floats) -> Ints:
    """Return the requests of the window, by arrival, no more than asked for."""
    is_inside = arrival_s >= spec.window_start_s
    if spec.window_end_s:
        is_inside &= arrival_s < spec.window_end_s
    rows = np.flatnonzero(is_inside)
    if len(rows) == 0:
        raise InvalidRequestError.of_field(
            "workload.window_start_s",
            f"no request arrives in the window; the first one arrives at {arrival_s.min():g} s, the"
            f" last one arrives at {arrival_s.max():g} s",
        )
    rows = rows[np.argsort(arrival_s[rows], kind="stable")]
    return rows[: spec.max_num_requests or None]


def _build_plan(
    spec: WorkloadSpec,
    draft: RequestDraft,
    rows: Ints,
    ranked_classes: tuple[Ints, Ints],
) -> RequestPlan:
    prompts, answers = _cut_lengths(
        draft.num_prefill_tokens[rows], draft.num_decode_tokens[rows], spec.max_tokens_per_request
    )
    follows = find_previous_turns(draft.session[rows])
    joins = _take_joins(draft.joins, rows, len(draft.arrival_s))
    arrival_s = draft.arrival_s[rows] - spec.window_start_s
    think_s = np.where(find_first(follows, joins), 0.0, draft.think_s[rows])
    if draft.concurrency:
        session = find_sessions(follows, joins)
        # Of a session that begins with several requests, when each comes.
        think_s = np.where(find_first(follows, joins), arrival_s - arrival_s[session], think_s)
        arrival_s = _place_ramp(session, draft)
    hash_offsets, hashes = _take_hashes(draft, rows, prompts, answers)
    slo_class, priority = ranked_classes
    return RequestPlan(
        arrival_ns=_to_ns(arrival_s * spec.time_scale),
        num_prefill_tokens=prompts,
        num_decode_tokens=answers,
        follows=follows,
        think_ns=_to_ns(think_s),
        joins=joins,
        slo_class=slo_class,
        priority=priority,
        stream=draft.stream[rows],
        prefix_stream=draft.prefix_stream[rows],
        prefix_tokens=np.minimum(draft.prefix_tokens[rows], prompts),
        hash_offsets=hash_offsets,
        hashes=hashes,
        hash_block_tokens=draft.hash_block_tokens,
        concurrency=draft.concurrency,
    )


def _take_joins(joins: Ints | None, rows: Ints, num_drafted: int) -> Ints | None:
    """Return the joins of some requests by their new places, in the order of the plan."""
    if joins is None:
        return None
    place = np.full(num_drafted, NONE, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    taken: Ints = place[joins]
    taken = taken[(taken != NONE).all(axis=1)]
    ordered: Ints = taken[np.lexsort((taken[:, 1], taken[:, 0]))]
    return ordered


def _place_ramp(session: Ints, draft: RequestDraft) -> Floats:
    """Return when sessions of a closed loop may begin: the first ones evenly over the ramp."""
    rank = np.cumsum(session == np.arange(len(session))) - 1
    # The rest carry the time of the last of the ramp: before it they cannot arrive.
    step_s = draft.ramp_s / draft.concurrency
    times_s: Floats = np.minimum(rank, draft.concurrency - 1) * step_s
    if draft.num_warmup == 0:
        return times_s
    return np.where(rank < draft.num_warmup, times_s, np.maximum(times_s, draft.resume_s))


def _cut_lengths(prompts: Ints, answers: Ints, max_tokens: int) -> tuple[Ints, Ints]:
    """Return lengths that engines can count, together with what all share and earlier turns."""
    longest = int((prompts + answers).max())
    if min(longest, max_tokens or longest) > MAX_COUNT:
        problem = f"of a request of {longest:,} tokens no more than {MAX_COUNT:,} can be: set it"
        raise InvalidRequestError.of_field("workload.max_tokens_per_request", problem)
    if max_tokens == 0:
        return prompts, answers
    # The prompt gives way first: the answer is what the user waits for.
    excess = np.maximum(prompts + answers - max_tokens, 0)
    prompts = np.maximum(prompts - excess, 1)
    return prompts, np.minimum(answers, max_tokens - prompts)


def _take_hashes(
    draft: RequestDraft, rows: Ints, prompts: Ints, answers: Ints
) -> tuple[Ints, Ints]:
    """Return the hashes of some requests as offsets and values; of a cut request what is left.

    Those of a turn that others follow reach into its answer.
    """
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    if len(draft.hashes) == 0:
        return offsets, draft.hashes
    starts = np.cumsum(draft.num_hashes) - draft.num_hashes
    num_hashes = draft.num_hashes[rows]
    is_prompt_cut = prompts < draft.num_prefill_tokens[rows]
    is_cut = is_prompt_cut | (answers < draft.num_decode_tokens[rows])
    length = np.where(is_prompt_cut, prompts, prompts + answers)
    num_left = np.minimum(num_hashes, -(-length // draft.hash_block_tokens))
    num_kept = np.where(is_cut, num_left, num_hashes)
    np.cumsum(num_kept, out=offsets[1:])
    source = np.repeat(starts[rows] - offsets[:-1], num_kept) + np.arange(offsets[-1])
    return offsets, draft.hashes[source]


def _assign_classes(draft: RequestDraft, slo_classes: Sequence[SloClass], seed: int) -> Ints:
    """Return the class of each request: by name, or drawn once for all turns of a session."""
    if draft.class_names is None:
        shares = np.cumsum([item.share_ratio for item in slo_classes])
        draws = named_stream(seed, "slo_classes").random(int(draft.session[-1]) + 1)
        drawn = np.searchsorted(shares, draws, side="right")
        return np.where(drawn < len(slo_classes), drawn, NONE)[draft.session]
    positions = {item.name: position for position, item in enumerate(slo_classes)}
    unknown = sorted(set(draft.class_names) - positions.keys())
    if unknown:
        raise InvalidRequestError.of_field(
            "slo_classes",
            f"the trace names {', '.join(unknown)}; known are {', '.join(positions) or 'none'}",
        )
    # The last entry is what the index NONE picks.
    return np.array([*(positions[name] for name in draft.class_names), NONE])[draft.class_index]


def _rank_classes(classes: Ints, slo_classes: Sequence[SloClass]) -> tuple[Ints, Ints]:
    """Return classes and their priorities; requests of no class have priority 0."""
    if not slo_classes:
        return classes, fill_rows(len(classes), 0)
    return classes, np.array([*(item.priority for item in slo_classes), 0])[classes]


def _to_ns(times_s: Floats) -> Ints:
    if not (np.isfinite(times_s) & (times_s <= _MAX_S)).all():
        raise InvalidRequestError.of_field(
            "workload", f"times beyond {_MAX_S:.0f} s: look at rate_rps, time_scale and think_s"
        )
    return np.rint(times_s * _NS_PER_S).astype(np.int64)
