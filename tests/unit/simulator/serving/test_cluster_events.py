"""What a cluster does when replicas fail, are full, start and stop, by times computed by hand."""

from dataclasses import replace

import numpy as np
from cluster_cases import PROFILE, US, plan_of, pool_of, run, times_us

from foretoken.domain.requests.cluster import (
    AutoscalingSpec,
    FailureSpec,
    ReplicaOutage,
    RoutingSpec,
)
from foretoken.simulator.cluster.setup import AdapterSetup, ClusterSetup
from foretoken.simulator.serving.record import PoolRecord, RequestOutcome

_COMPLETED, _LOST, _REJECTED = (
    RequestOutcome.COMPLETED,
    RequestOutcome.LOST,
    RequestOutcome.REJECTED,
)
_ONE = ClusterSetup(pools=(pool_of(),))
_OUTAGE = ReplicaOutage(pool="pool", replica=0, start_s=12 * US, restart_s=20 * US)


def _spans(pool: PoolRecord) -> list[tuple[int, float, float, bool]]:
    return [
        (span.engine, span.start_ns / 1e3, span.end_ns / 1e3, span.is_ready) for span in pool.spans
    ]


def test_a_failed_replica_comes_back_and_its_requests_begin_anew() -> None:
    """The first token had left at 10 µs; from 32 µs on all is done again: 10 + 2 x 5.5 µs."""
    failures = FailureSpec(max_retries=1, outages=(_OUTAGE,))
    record = run(plan_of((0, 10, 3)), _ONE, failures=failures)
    assert times_us(record.requests.arrival_ns) == [0.0]
    assert times_us(record.requests.first_token_ns) == [42.0]
    assert times_us(record.requests.finished_ns) == [53.0]
    assert record.requests.num_retries.tolist() == [1]
    assert times_us(record.steps[0].end_ns) == [10.0, 42.0, 47.5, 53.0]
    assert record.tokens.first_step.tolist() == [1]
    assert record.tokens.count.tolist() == [3]
    assert _spans(record.pools[0]) == [(0, 0, 12, True), (0, 12, 32, False), (0, 32, 53, True)]


def test_a_request_goes_to_another_replica_after_the_delay() -> None:
    failures = FailureSpec(max_retries=1, retry_delay_s=3 * US, outages=(_OUTAGE,))
    setup = ClusterSetup(pools=(pool_of(num_replicas=2),))
    record = run(plan_of((0, 10, 3)), setup, failures=failures)
    assert record.requests.engine.tolist() == [1]
    assert times_us(record.requests.finished_ns) == [15.0 + 21.0]


def test_a_request_that_may_not_begin_anew_is_lost_and_its_follower_goes_on() -> None:
    """The next turn of the session is sent when the first is lost, at 12 µs, and waits to 32."""
    plan = plan_of((0, 10, 3), (0, 10, 1))
    plan = replace(plan, follows=np.array([-1, 0]))
    failures = FailureSpec(max_retries=0, outages=(_OUTAGE,))
    record = run(plan, _ONE, failures=failures)
    assert record.requests.outcome.tolist() == [_LOST, _COMPLETED]
    assert times_us(record.requests.arrival_ns) == [0.0, 12.0]
    assert times_us(record.requests.finished_ns) == [-0.001, 42.0]
    assert record.tokens.request.tolist() == [1]


def test_replicas_fail_at_random_in_proportion_to_their_time() -> None:
    """500 requests one after the other keep a replica busy 10.5 ms, with failures every 1 ms."""
    plan = replace(plan_of(*[(0, 10, 3)] * 500), concurrency=1)
    failures = FailureSpec(mtbf_s=1e-3, restart_s=1 * US, max_retries=9)
    counts = []
    for seed in range(8):
        record = run(plan, _ONE, failures=failures, seed=seed)
        assert (record.requests.outcome == _COMPLETED).all()
        counts.append(record.pools[0].num_failures)
    # A Poisson count of mean 84: four standard deviations either side.
    assert abs(sum(counts) - 84) < 4 * 84**0.5
    assert len(set(counts)) > 1


def test_a_full_router_rejects_and_a_full_replica_lets_wait() -> None:
    """One runs, one waits until it ends at 15.5 µs, the third is one too many."""
    routing = RoutingSpec(max_outstanding=1, max_queued=1)
    record = run(plan_of((0, 10, 2), (1, 10, 2), (2, 10, 2)), _ONE, routing=routing)
    assert record.requests.outcome.tolist() == [_COMPLETED, _COMPLETED, _REJECTED]
    assert times_us(record.requests.first_token_ns) == [10.0, 25.5, -0.001]
    assert record.requests.engine.tolist() == [0, 0, -1]


def test_a_rejected_request_of_a_closed_loop_lets_the_next_come() -> None:
    plan = replace(plan_of(*[(0, 10, 2)] * 4), concurrency=3)
    routing = RoutingSpec(max_outstanding=1, max_queued=1)
    record = run(plan, _ONE, routing=routing)
    assert record.requests.outcome.tolist() == [_COMPLETED, _COMPLETED, _REJECTED, _REJECTED]


def test_the_router_sends_the_higher_priority_first() -> None:
    plan = replace(plan_of((0, 10, 2), (1, 10, 2), (2, 10, 2)), priority=np.array([0, 0, 1]))
    record = run(plan, _ONE, routing=RoutingSpec(max_outstanding=1))
    assert times_us(record.requests.first_token_ns) == [10.0, 41.0, 25.5]


def test_an_engine_admits_the_higher_priority_first_where_it_knows_priorities() -> None:
    plan = replace(plan_of((0, 10, 2), (1, 10, 2), (2, 10, 2)), priority=np.array([0, 0, 1]))
    for knows, expected in ((False, [10.0, 25.5, 41.0]), (True, [10.0, 41.0, 25.5])):
        profile = replace(PROFILE, max_num_seqs=1, has_priority_scheduling=knows)
        record = run(plan, ClusterSetup(pools=(pool_of(profile=profile),)))
        assert times_us(record.requests.first_token_ns) == expected


def test_a_router_with_old_loads_sends_all_to_one() -> None:
    """It learns of loads at 0 and 1000 µs: nothing anywhere, so the first replica is the best."""
    setup = ClusterSetup(pools=(pool_of(num_replicas=2),))
    plan = plan_of((0, 10, 2), (1, 10, 2), (2, 10, 2))
    for interval_ms, engines in ((0.0, [0, 1, 0]), (1.0, [0, 0, 0])):
        routing = RoutingSpec(router="least_outstanding", load_interval_ms=interval_ms)
        record = run(plan, setup, routing=routing)
        assert record.requests.engine.tolist() == engines


def test_a_request_goes_to_a_pool_that_can_hold_it() -> None:
    """In turn, but the long one fits into the second pool only; engines count through both."""
    setup = ClusterSetup(pools=(pool_of("a", num_kv_blocks=1), pool_of("b")))
    record = run(plan_of((0, 10, 2), (0, 30, 2), (0, 10, 2), (0, 2000, 2)), setup)
    assert record.requests.engine.tolist() == [0, 1, 0, -1]
    assert record.requests.outcome.tolist()[3] == RequestOutcome.EXCEEDS_KV_CACHE
    assert [(pool.first_engine, pool.num_kv_blocks) for pool in record.pools] == [(0, 1), (1, 100)]


def test_an_autoscaler_starts_replicas_cold_and_lets_others_drain() -> None:
    """Two replicas wanted from 20 µs on, the second serves at 50; one again from 80 µs on.

    At 80 µs the first has a request and the second has none, so that goes at once. The last
    request joins the first's at 93.5 µs, after its second token, in a step of 10.5 µs.
    """
    scaling = AutoscalingSpec(
        policy="schedule",
        max_replicas=2,
        interval_s=20 * US,
        cold_start_s=30 * US,
        options={"times_s": "0.00002, 0.00008", "replicas": "2, 1"},
    )
    setup = ClusterSetup(pools=(pool_of(num_engines=2, autoscaling=scaling),))
    plan = plan_of((0, 10, 2), (45, 10, 1), (60, 10, 1), (78, 10, 3), (90, 10, 1))
    routing = RoutingSpec(router="least_outstanding")
    record = run(plan, setup, routing=routing)
    assert record.requests.engine.tolist() == [0, 0, 0, 0, 0]
    assert _spans(record.pools[0]) == [
        (0, 0, 104, True),
        (1, 20, 50, False),
        (1, 50, 80, True),
    ]
    pool = record.pools[0]
    assert (pool.num_scale_ups, pool.num_scale_downs) == (1, 1)


def test_a_replica_that_drains_ends_what_it_has_and_takes_nothing_new() -> None:
    """Two run at first, both busy from 18 µs on; at 20 µs the one that has less is given up."""
    scaling = AutoscalingSpec(
        policy="schedule",
        max_replicas=2,
        interval_s=20 * US,
        options={"times_s": "0", "replicas": "1"},
    )
    setup = ClusterSetup(pools=(pool_of(num_replicas=2, autoscaling=scaling),))
    plan = plan_of((17, 10, 2), (18, 10, 2), (19, 10, 2), (21, 10, 2))
    record = run(plan, setup)
    assert record.requests.engine.tolist() == [0, 1, 0, 0]
    assert times_us(record.requests.finished_ns[[1]]) == [18 + 15.5]
    spans = [span for span in _spans(record.pools[0]) if span[0] == 1]
    assert spans == [(1, 0, 20, True), (1, 20, 33.5, True)]


def test_an_adapter_is_loaded_before_its_first_request_starts() -> None:
    """3 µs to load; the next request of the same adapter finds it, another has to wait."""
    pool = pool_of(adapters=AdapterSetup(max_loaded=1, load_ns=3000))
    plan = plan_of((0, 10, 1), (20, 10, 1), (40, 10, 1))
    plan = replace(plan, adapter=np.array([0, 0, 1]))
    record = run(plan, ClusterSetup(pools=(pool,)))
    assert times_us(record.requests.first_token_ns) == [13.0, 30.0, 53.0]
    assert [pool.num_adapter_loads for pool in record.pools] == [2]


def test_a_replica_in_lock_step_fails_as_a_whole() -> None:
    """Of its two engines one has a request, which begins anew on a free engine of the other."""
    pool = pool_of(num_engines=4, num_replicas=2, engines_per_replica=2)
    engines = replace(pool.engines, is_lock_step=True, router="least_loaded")
    setup = ClusterSetup(
        pools=(replace(pool, engines=engines),), routing=RoutingSpec(router="least_loaded")
    )
    plan = plan_of((0, 10, 3), (0, 10, 3))
    assert run(plan, setup).requests.engine.tolist() == [0, 2]
    record = run(plan, setup, failures=FailureSpec(max_retries=1, outages=(_OUTAGE,)))
    assert record.pools[0].num_failures == 1
    assert record.requests.num_retries.tolist() == [1, 0]
    assert record.requests.engine.tolist() == [3, 2]
