"""Clusters of engines that serve one request at a time against queueing theory."""

import heapq
from dataclasses import replace
from typing import Any

import numpy as np
from cluster_cases import PROFILE, plan_of, pool_of, run
from numpy.typing import NDArray

from foretoken.domain.requests.cluster import RoutingSpec
from foretoken.simulator.cluster.setup import ClusterSetup
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.simulation import run_cluster
from foretoken.simulator.workload.request_plan import RequestPlan

_NUM_SERVERS = 4
_UTILIZATION = 0.8
# A token a step: answers of a geometric length take an almost exponential time.
_STEP_NS = 5_500
_TOKENS_MEAN = 10


def _make_plan(num_requests: int) -> RequestPlan:
    rng = np.random.default_rng(1)
    gap_us = _TOKENS_MEAN * _STEP_NS / 1e3 / (_NUM_SERVERS * _UTILIZATION)
    arrival_us = np.cumsum(rng.exponential(gap_us, num_requests))
    answers = rng.geometric(1 / _TOKENS_MEAN, num_requests)
    return plan_of(*((arrival_us[i], 1, answers[i]) for i in range(num_requests)))


def _waits_ns(plan: RequestPlan, **routing: Any) -> NDArray[np.int64]:
    """Return how long requests wait for their first step, at the router and on the engine."""
    profile = replace(PROFILE, max_num_seqs=1)
    setup = ClusterSetup(pools=(pool_of(num_replicas=_NUM_SERVERS, profile=profile),))
    requests = run(plan, setup, routing=RoutingSpec(**routing)).requests
    return np.asarray(requests.scheduled_ns - requests.arrival_ns)


def test_one_queue_before_all_replicas_is_a_queue_of_several_servers() -> None:
    """Each request takes the server that is free first. Source: Kiefer and Wolfowitz, 1955."""
    plan = _make_plan(300)
    free_ns = [0] * _NUM_SERVERS
    expected = []
    for arrival_ns, num_tokens in zip(plan.arrival_ns, plan.num_decode_tokens, strict=True):
        start_ns = max(int(arrival_ns), heapq.heappop(free_ns))
        heapq.heappush(free_ns, start_ns + int(num_tokens) * _STEP_NS)
        expected.append(start_ns - int(arrival_ns))
    assert max(expected) > 0
    assert _waits_ns(plan, max_outstanding=1).tolist() == expected


def test_routers_that_know_more_let_requests_wait_less() -> None:
    """One queue, then the shortest of all queues, of two, one in turn, any."""
    plan = _make_plan(600)
    waits_ns = [
        float(np.mean(_waits_ns(plan, **routing)))
        for routing in (
            {"max_outstanding": 1},
            {"router": "least_outstanding"},
            {"router": "power_of_two"},
            {"router": "round_robin"},
            {"router": "random"},
        )
    ]
    assert waits_ns == sorted(waits_ns)
    assert waits_ns[-1] > 2 * waits_ns[0]


def test_of_unlike_replicas_the_slower_gets_fewer_requests() -> None:
    """At half the speed half as many, where a request always waits for whoever is free."""
    profile = replace(PROFILE, max_num_seqs=1)
    pools = tuple(pool_of(name, profile=profile) for name in ("fast", "slow"))
    plan = plan_of(*((0.0, 1, 10) for _ in range(60)))
    setup = ClusterSetup(pools=pools, routing=RoutingSpec(max_outstanding=1))
    tables = (flat_tables(5.0, 0.5), flat_tables(10.0, 1.0))
    record = run_cluster(plan, setup, tables, lambda _: None)
    assert np.bincount(record.requests.engine).tolist() == [40, 20]
