"""Draw requests: lengths, sessions and shared prefixes around the times of an arrival process."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.workload import LengthSpec, SessionSpec, WorkloadSpec
from foretoken.simulator.workload.request_draft import (
    MAX_LENGTH,
    Floats,
    RequestDraft,
    fill_rows,
    find_previous_turns,
)
from foretoken.simulator.workload.request_plan import NONE, Ints
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
    return np.minimum(lengths, spec.maximum or MAX_LENGTH).astype(np.int64)


def _look_up(kind: str, known: Mapping[str, T]) -> T:
    if kind not in known:
        raise InvalidRequestError.of_field("kind", f"{kind!r} is not one of {', '.join(known)}")
    return known[kind]


def _check_bounds(spec: LengthSpec) -> None:
    longest = max(spec.mean, spec.minimum, spec.maximum, *spec.values, 0)
    if longest > MAX_LENGTH:
        raise InvalidRequestError.of_field("maximum", f"{longest} is beyond {MAX_LENGTH} tokens")
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
