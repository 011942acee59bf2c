"""The requests of a simulation before it runs, as columns: drafts, plans, who waits for whom."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.domain.units import MAX_COUNT
from foretoken.simulator.grid import Flags, Floats, Ints

# In `follows`, `slo_class` and `prefix_stream`: there is none.
NONE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """One entry per request, in the order they may arrive; times in ns.

    `arrival_ns` is the earliest arrival, ascending. A request with `follows` (an earlier index)
    arrives `think_ns` after that one is complete, or at `arrival_ns` if that is later. `joins` has
    a row for every further one that a request waits for, also an earlier index: it then arrives
    `think_ns` after the last of them. Requests that wait for each other are a session. With
    `concurrency` above 0 the loop is closed: that many sessions begin at their `arrival_ns`, and
    each that is complete lets the next begin at that instant; `think_ns` of a request that waits
    for none is then its time from the session's begin.

    Content, for prefix caching: the block of tokens from b x `block_size` on is named by the hash
    of the plan where `hashes[hash_offsets[r]:hash_offsets[r + 1]]`, one for `hash_block_tokens`
    tokens each, cover it; else by `prefix_stream` where it lies within the first `prefix_tokens`;
    else by `stream`. Blocks of equal name and place have equal content, prompt or answer; requests
    of a session share a stream. `slo_class` indexes the scenario's classes; of waiting requests the
    higher `priority` goes first where the scheduler knows priorities. `adapter` is the LoRA adapter
    each uses (None: none).
    """

    arrival_ns: Ints
    num_prefill_tokens: Ints
    num_decode_tokens: Ints
    follows: Ints
    think_ns: Ints
    slo_class: Ints
    priority: Ints
    stream: Ints
    prefix_stream: Ints
    prefix_tokens: Ints
    hash_offsets: Ints
    hashes: Ints
    hash_block_tokens: int = 0
    concurrency: int = 0
    adapter: Ints | None = None
    joins: Ints | None = None

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_ns)

    @property
    def mean_tokens(self) -> float:
        """Tokens of a prompt with its answer, on average; 0 without requests."""
        total = self.num_prefill_tokens.sum() + self.num_decode_tokens.sum()
        return float(total) / max(self.num_requests, 1)


def plan_requests(
    arrival_ns: Ints, num_prefill_tokens: Ints, num_decode_tokens: Ints, *, concurrency: int = 0
) -> RequestPlan:
    """Return requests that follow nothing, share nothing and have no class, by arrival."""
    order = np.argsort(arrival_ns, kind="stable")
    num_requests = len(order)
    none = np.full(num_requests, NONE, dtype=np.int64)
    zero = np.zeros(num_requests, dtype=np.int64)
    return RequestPlan(
        arrival_ns=np.asarray(arrival_ns, dtype=np.int64)[order],
        num_prefill_tokens=np.asarray(num_prefill_tokens, dtype=np.int64)[order],
        num_decode_tokens=np.asarray(num_decode_tokens, dtype=np.int64)[order],
        follows=none,
        think_ns=zero,
        slo_class=none,
        priority=zero,
        stream=np.arange(num_requests, dtype=np.int64),
        prefix_stream=none,
        prefix_tokens=zero,
        hash_offsets=np.zeros(num_requests + 1, dtype=np.int64),
        hashes=np.zeros(0, dtype=np.int64),
        concurrency=concurrency,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestDraft:
    """One entry per request; times in s, before windows, scaling and limits are applied.

    Entries of equal `session` (`NONE`: of none) are its turns in order, and their `arrival_s` do
    not fall. `joins` has rows of an entry and an earlier one, of any session, that must be complete
    before it. `hashes` holds `num_hashes[r]` names for each request in turn. `class_names` are the
    names that `class_index` indexes; None where classes are drawn by their shares. With
    `concurrency` above 0 the loop is closed: `arrival_s` then is an order, and the first requests
    arrive evenly over `ramp_s`; those after `num_warmup` sessions do not before `resume_s`. The
    other columns are those of `RequestPlan`.
    """

    arrival_s: Floats
    num_prefill_tokens: Ints
    num_decode_tokens: Ints
    session: Ints
    think_s: Floats
    stream: Ints
    prefix_stream: Ints
    prefix_tokens: Ints
    num_hashes: Ints
    hashes: Ints
    class_index: Ints
    class_names: tuple[str, ...] | None = None
    hash_block_tokens: int = 0
    concurrency: int = 0
    ramp_s: float = 0.0
    num_warmup: int = 0
    resume_s: float = 0.0
    joins: Ints | None = None


# What an arrival plug-in is: (specification, seed) -> requests.
ArrivalProcess = Callable[[WorkloadSpec, int], RequestDraft]


def fill_rows(num_rows: int, value: int) -> Ints:
    """Return a column of one value."""
    return np.full(num_rows, value, dtype=np.int64)


def find_previous_turns(session: Ints) -> Ints:
    """Return for each entry the one before it in its session, `NONE` for first turns."""
    previous = fill_rows(len(session), NONE)
    rows = np.flatnonzero(session != NONE)
    rows = rows[np.argsort(session[rows], kind="stable")]
    is_later = session[rows[1:]] == session[rows[:-1]]
    previous[rows[1:][is_later]] = rows[:-1][is_later]
    return previous


def check_options(spec: WorkloadSpec, known: Sequence[str]) -> None:
    """Check that the arrival process has all options it was given.

    Raises:
        InvalidRequestError: one violation for the first unknown option.

    """
    for name in spec.arrival_options:
        if name not in known:
            choices = ", ".join(known) or "none"
            raise option_error(name, f"{spec.arrival} knows these options: {choices}")


def read_number(
    spec: WorkloadSpec, name: str, default: float, *, can_be_zero: bool = False
) -> float:
    """Return an option that is a positive number, or 0 where that means something.

    Raises:
        InvalidRequestError: it is not.

    """
    text = spec.arrival_options.get(name)
    if text is None:
        return default
    number = _parse_number(name, text)
    if number < 0 or (number == 0 and not can_be_zero):
        needed = "must not be negative" if can_be_zero else "must be positive"
        raise option_error(name, f"{needed}, found {text}")
    return number


def read_numbers(spec: WorkloadSpec, name: str, default: str) -> Floats:
    """Return an option that is a list of numbers of at least 0, written `0.5, 2`.

    Raises:
        InvalidRequestError: one is none, or is negative.

    """
    text = spec.arrival_options.get(name, default)
    numbers = np.array([_parse_number(name, part) for part in text.strip("[] ").split(",")])
    if (numbers < 0).any():
        raise option_error(name, f"must not be negative, found {text}")
    return numbers


# The options of a closed loop.
LOOP_OPTIONS = ("concurrency", "ramp_s", "num_warmup", "resume_s")


class ClosedLoop(NamedTuple):
    """How many requests run at a time, and when the first, and those after a warm-up, arrive."""

    concurrency: int = 0
    ramp_s: float = 0.0
    num_warmup: int = 0
    resume_s: float = 0.0


def read_loop(spec: WorkloadSpec) -> ClosedLoop:
    """Return the closed loop that options describe.

    Raises:
        InvalidRequestError: no whole number runs at a time, or a time is negative.

    """
    if "concurrency" not in spec.arrival_options:
        raise option_error("concurrency", "a closed loop needs how many requests run at a time")
    return ClosedLoop(
        concurrency=read_count(spec, "concurrency"),
        ramp_s=read_number(spec, "ramp_s", 0.0, can_be_zero=True),
        num_warmup=read_count(spec, "num_warmup"),
        resume_s=read_number(spec, "resume_s", 0.0, can_be_zero=True),
    )


def read_count(spec: WorkloadSpec, name: str) -> int:
    """Return an option that counts requests, at least one; where it is absent, 0.

    Raises:
        InvalidRequestError: it is no such number.

    """
    count = read_number(spec, name, 0.0)
    if not count.is_integer() or count > MAX_COUNT:
        raise option_error(name, f"must be a whole number, found {count:g}")
    return int(count)


def option_error(name: str, description: str) -> InvalidRequestError:
    """Return the error about an option of the arrival process."""
    return InvalidRequestError.of_field(f"workload.arrival_options.{name}", description)


def _parse_number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not np.isfinite(number):
        raise option_error(name, f"expected a number, found {text.strip()!r}")
    return number


class Waits(NamedTuple):
    """Pairs of a request and one that must be complete before it arrives, by the latter."""

    after: Ints
    before: Ints


def find_waits(follows: Ints, joins: Ints | None) -> Waits:
    """Return all pairs of a plan's `follows` and `joins`, each once, by the one that is waited for.

    Of one that is waited for, those who wait are in the order of the plan.
    """
    later = np.flatnonzero(follows != NONE)
    after, before = later, follows[later]
    if joins is not None and len(joins):
        after, before = np.append(after, joins[:, 0]), np.append(before, joins[:, 1])
    pairs = np.unique(np.stack([before, after]), axis=1)
    return Waits(after=pairs[1], before=pairs[0])


def find_first(follows: Ints, joins: Ints | None) -> Flags:
    """Return which requests wait for no other."""
    is_first: Flags = follows == NONE
    if joins is not None:
        is_first = is_first.copy()
        is_first[joins[:, 0]] = False
    return is_first


def find_sessions(follows: Ints, joins: Ints | None) -> Ints:
    """Return the session of each request: the lowest index of those that wait for each other."""
    session = np.arange(len(follows), dtype=np.int64)
    later = np.flatnonzero(follows != NONE)
    session[later] = follows[later]
    session = _follow_to_root(session)
    for after, before in [] if joins is None else joins.tolist():
        one, other = int(session[after]), int(session[before])
        while session[one] != one:
            one = int(session[one])
        while session[other] != other:
            other = int(session[other])
        session[max(one, other)] = min(one, other)
    return _follow_to_root(session)


def name_sessions(plan: RequestPlan) -> Ints | None:
    """Return the session of each request of a plan; None where no request waits for another."""
    if find_first(plan.follows, plan.joins).all():
        return None
    return find_sessions(plan.follows, plan.joins)


def _follow_to_root(parent: Ints) -> Ints:
    """Return the root above each; every round doubles how far a pointer reaches."""
    while (parent[parent] != parent).any():
        parent = parent[parent]
    return parent


def count_opening(session: Ints, concurrency: int) -> int:
    """Return how many entries, in order of their sessions, are of the first so many sessions."""
    if len(session) == 0:
        return 0
    rank = np.cumsum(np.append(0, session[1:] != session[:-1]))
    return int(np.searchsorted(rank, concurrency))
