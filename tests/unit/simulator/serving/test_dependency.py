"""Requests that wait for several others: who waits for whom, when they come, what is a session."""

from dataclasses import replace

import numpy as np
import pytest
from cluster_cases import plan_of, pool_of, run, times_us

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.simulator.cluster.setup import ClusterSetup
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.grid import Ints
from foretoken.simulator.serving.metrics import session_latencies_ns, summarize_requests
from foretoken.simulator.serving.record import RequestOutcome, ServingRecord
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import (
    NONE,
    RequestPlan,
    count_opening,
    find_first,
    find_sessions,
    find_waits,
)
from foretoken.simulator.workload.requests import resolve_workload


def _ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def _joins(*rows: tuple[int, int]) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def test_each_pair_is_there_once_by_the_one_that_is_waited_for() -> None:
    waits = find_waits(_ints(NONE, 0, NONE, 1), _joins((3, 2), (3, 1), (2, 0)))
    assert list(zip(waits.before.tolist(), waits.after.tolist(), strict=True)) == [
        (0, 1), (0, 2), (1, 3), (2, 3),
    ]  # fmt: skip
    assert find_first(_ints(NONE, 0, NONE), _joins((2, 1))).tolist() == [True, False, False]
    assert find_first(_ints(NONE, 0, NONE), None).tolist() == [True, False, True]


def test_a_session_is_what_waits_for_each_other_directly_or_not() -> None:
    follows = _ints(NONE, NONE, 0, NONE, 1, NONE)
    assert find_sessions(follows, None).tolist() == [0, 1, 0, 3, 1, 5]
    assert find_sessions(follows, _joins((4, 3))).tolist() == [0, 1, 0, 1, 1, 5]
    assert find_sessions(follows, _joins((4, 3), (5, 2), (5, 4))).tolist() == [0] * 6


def test_sessions_open_whole() -> None:
    assert [count_opening(_ints(0, 0, 3, 7, 7), count) for count in (1, 2, 3, 9)] == [2, 3, 5, 5]
    assert count_opening(_ints(), 4) == 0


# A prompt of ten tokens takes 10 µs, each further token of one answer 5.5 µs, as `cluster_cases`
# has it; the branches run on engines of their own.
_FORK = _joins((1, 0), (2, 0), (3, 1), (3, 2))


def _fork(**fields: object) -> RequestPlan:
    """Return a request, two side by side after it, and one after both that thinks for 4 µs."""
    plan = plan_of((0, 10, 1), (0, 10, 3), (0, 10, 1), (0, 10, 1))
    changes = {"joins": _FORK, "think_ns": _ints(0, 0, 2_000, 4_000), **fields}
    return replace(plan, **changes)  # type: ignore[arg-type]


def _run_both(plan: RequestPlan) -> tuple[ServingRecord, ServingRecord]:
    """Return what two engines do behind a router and as one deployment."""
    cluster = run(plan, ClusterSetup(pools=(pool_of(num_replicas=2),)))
    setup = pool_of(num_replicas=2).engines
    return cluster, run_deployment(plan, setup, flat_tables(5.0, 0.5), lambda _: None)


def test_what_joins_branches_comes_after_the_last_of_them() -> None:
    for record in _run_both(_fork()):
        assert times_us(record.requests.arrival_ns) == [0.0, 10.0, 12.0, 35.0]
        assert times_us(record.requests.finished_ns) == [10.0, 31.0, 22.0, 45.0]


def test_the_next_session_of_a_closed_loop_waits_for_all_branches() -> None:
    """The first ends with its longer branch, at 31 µs; the second begins twice, 5 µs apart."""
    plan = plan_of((0, 10, 1), (0, 10, 3), *[(0, 10, 1)] * 4)
    joins = _joins((1, 0), (2, 0), (5, 3), (5, 4))
    think_ns = _ints(0, 0, 2_000, 0, 5_000, 1_000)
    for record in _run_both(replace(plan, joins=joins, think_ns=think_ns, concurrency=1)):
        assert times_us(record.requests.arrival_ns) == [0.0, 10.0, 12.0, 31.0, 36.0, 47.0]


def test_the_latency_of_a_session_is_from_its_first_arrival_to_its_last_token() -> None:
    """Of the four requests that wait for each other, 45 µs; the one alone is no session."""
    plan = plan_of((0, 10, 1), (0, 10, 3), (0, 10, 1), (0, 10, 1), (90, 10, 1))
    plan = replace(plan, joins=_FORK, think_ns=_ints(0, 0, 2_000, 4_000, 0))
    for record in _run_both(plan):
        assert session_latencies_ns(record.requests).tolist() == [45_000]
        assert summarize_requests(record)["session_latency_ms"].p50 == 0.045
    alone = run(plan_of((0, 10, 1)), ClusterSetup(pools=(pool_of(),)))
    assert session_latencies_ns(alone.requests).tolist() == []


def test_a_session_that_did_not_complete_has_no_latency() -> None:
    plan = replace(plan_of((0, 10, 1), (0, 3_000, 1)), follows=_ints(NONE, 0))
    record = run(plan, ClusterSetup(pools=(pool_of(num_kv_blocks=20),)))
    assert record.requests.outcome.tolist().count(RequestOutcome.COMPLETED) == 1
    assert session_latencies_ns(record.requests).tolist() == []


def _request(arrival_s: float, session: int = 0, after: tuple[int, ...] = ()) -> Request:
    return Request(
        arrival_s=arrival_s,
        num_prefill_tokens=8,
        num_decode_tokens=2,
        session=session,
        after=after,
        think_s=1.0,
    )


def _replay(*requests: Request, **fields: object) -> RequestPlan:
    spec = WorkloadSpec(arrival="trace", trace_requests=requests, **fields)  # type: ignore[arg-type]
    return resolve_workload(spec, (), 0)


def test_requests_of_a_trace_name_the_places_of_those_they_wait_for() -> None:
    """Rows are sorted by arrival; one that waits comes no earlier than the one it waits for."""
    plan = _replay(
        _request(5.0, session=1),
        _request(9.0),
        _request(0.0, after=(0,)),
        _request(0.0, session=1, after=(2,)),
    )
    assert plan.arrival_ns.tolist() == [5 * 10**9] * 3 + [9 * 10**9]
    assert plan.follows.tolist() == [NONE, NONE, 0, NONE]
    assert plan.joins is not None
    assert plan.joins.tolist() == [[1, 0], [2, 1]]
    assert plan.think_ns.tolist() == [0, 10**9, 10**9, 0]


def test_one_whose_branch_is_outside_the_window_does_not_wait_for_it() -> None:
    plan = _replay(_request(0.0), _request(2.0), _request(3.0, after=(0, 1)), window_start_s=1)
    assert plan.joins is not None
    assert plan.joins.tolist() == [[1, 0]]


def test_later_roots_of_a_session_of_a_closed_loop_keep_their_distance() -> None:
    requests = [_request(7.0), _request(7.5), _request(8.0, after=(0, 1)), _request(9.0)]
    plan = _replay(*requests, arrival_options={"concurrency": "1"})
    assert plan.arrival_ns.tolist() == [0] * 4
    assert plan.think_ns.tolist() == [0, 500_000_000, 10**9, 0]


@pytest.mark.parametrize("after", [(1,), (2,), (-1,)])
def test_only_earlier_requests_can_be_waited_for(after: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match=r"trace_requests\[1\]\.after: .* earlier one"):
        _replay(_request(0.0), _request(0.0, after=after))
