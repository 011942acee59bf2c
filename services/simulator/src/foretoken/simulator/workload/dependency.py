"""Which requests of a plan wait for which: turns of a session, parallel branches, joins."""

from typing import NamedTuple

import numpy as np

from foretoken.simulator.grid import Flags, Ints
from foretoken.simulator.workload.request_plan import NONE, RequestPlan


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
