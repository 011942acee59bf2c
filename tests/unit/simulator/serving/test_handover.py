"""How requests move from prefill to decode pools, by times computed by hand."""

import dataclasses

import numpy as np
import pytest
from cluster_cases import SLOW_PORT, pair_of, plan_of, pool_of, run, times_us

from foretoken.domain.requests.cluster import (
    AutoscalingSpec,
    FailureSpec,
    ReplicaOutage,
    RoutingSpec,
)
from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.cluster.setup import ClusterSetup
from foretoken.simulator.serving.record import RequestOutcome

_ONE = plan_of((0, 10, 3))


def test_a_request_alone_on_endless_ports_takes_as_long_as_on_one_engine() -> None:
    """10 µs to the first token, then two steps of 5.5 µs."""
    together = run(_ONE, ClusterSetup(pools=(pool_of(),)))
    apart = run(_ONE, pair_of())
    for record in (together, apart):
        assert times_us(record.requests.first_token_ns) == [10.0]
        assert times_us(record.requests.finished_ns) == [21.0]
    assert apart.requests.prefill_engine.tolist() == [0]
    assert apart.requests.engine.tolist() == [1]
    assert times_us(apart.requests.transferred_ns) == [10.0]
    assert apart.tokens.engine.tolist() == [0, 1]
    assert apart.tokens.count.tolist() == [1, 2]


def test_the_second_token_waits_for_the_cache() -> None:
    """1000 bytes at 100 MB/s are 10 µs, the latency 1 µs; both pools count what moved."""
    record = run(_ONE, pair_of(latency_ns=1000, port_bytes_per_s=SLOW_PORT))
    assert times_us(record.requests.transferred_ns) == [21.0]
    assert times_us(record.requests.finished_ns) == [32.0]
    assert [(pool.sent_bytes, pool.port_busy_ns) for pool in record.pools] == [(1000, 10_000)] * 2


def test_layers_that_moved_while_the_prompt_was_computed_are_not_waited_for() -> None:
    """The prefill takes 10 µs; a transfer of 10 µs leaves its last layer, one of 20 µs its half."""
    for port, left_us in ((SLOW_PORT, 2.5), (SLOW_PORT / 2, 10.0)):
        record = run(_ONE, pair_of(port_bytes_per_s=port, overlaps_prefill=True))
        assert times_us(record.requests.transferred_ns) == [10.0 + left_us]


def test_transfers_of_one_sender_come_one_after_the_other() -> None:
    """Two prompts end together at 15 µs; each goes to a decode replica of its own."""
    setup = pair_of(port_bytes_per_s=SLOW_PORT, num_replicas=2)
    record = run(plan_of((0, 10, 2), (0, 10, 2)), setup)
    assert times_us(record.requests.prefilled_ns) == [15.0, 15.0]
    assert times_us(record.requests.first_token_ns) == [25.0, 35.0]
    assert record.requests.engine.tolist() == [1, 2]
    assert times_us(record.requests.transferred_ns) == [25.0, 35.0]


def test_a_full_decode_engine_holds_the_prefill_engine_up() -> None:
    """One block of 16 tokens each: the decode engine takes one request at a time.

    The second prompt is computed while the first decodes and then keeps its block.
    """
    setup = pair_of(num_kv_blocks=1)
    prefill = setup.pools[0]
    engines = dataclasses.replace(prefill.engines, num_kv_blocks=1)
    setup = dataclasses.replace(
        setup, pools=(dataclasses.replace(prefill, engines=engines), setup.pools[1])
    )
    record = run(plan_of((0, 10, 5), (0, 10, 2), (0, 10, 2)), setup)
    # 10 + 4 x 5.5 = 32; the second computed from 10 to 20, decodes from 32; the third can be
    # computed only when the second has left.
    assert times_us(record.requests.prefilled_ns) == [10.0, 20.0, 42.0]
    # Clients have the second's first token when it decodes.
    assert times_us(record.requests.first_token_ns) == [10.0, 32.0, 42.0]
    assert times_us(record.requests.transferred_ns) == [10.0, 32.0, 42.0]
    assert times_us(record.requests.finished_ns) == [32.0, 37.5, 47.5]


def test_an_answer_of_one_token_never_moves() -> None:
    record = run(plan_of((0, 10, 1)), pair_of())
    assert record.requests.engine.tolist() == [0]
    assert record.requests.prefill_engine.tolist() == [-1]
    assert record.requests.transferred_ns.tolist() == [-1]
    assert times_us(record.requests.finished_ns) == [10.0]


def test_what_no_decode_engine_can_hold_is_refused_on_arrival() -> None:
    """The prompt alone would fit, but its answer not."""
    record = run(plan_of((0, 10, 30)), pair_of(num_kv_blocks=2))
    assert record.requests.outcome.tolist() == [RequestOutcome.EXCEEDS_KV_CACHE]
    assert [len(steps.end_ns) for steps in record.steps] == [0, 0]


@pytest.mark.parametrize(("pool", "start_us"), [("prefill", 15), ("decode", 15), ("decode", 25)])
def test_a_request_begins_anew_when_either_engine_fails(pool: str, start_us: float) -> None:
    """It moves from 10 to 20 µs and would end at 31; the failed engine is back 50 µs later.

    Anew: 10 µs of prefill, as soon as the prefill engine is there; 10 µs to move, 11 µs to decode.
    """
    outage = ReplicaOutage(pool=pool, replica=0, start_s=start_us * 1e-6, restart_s=50e-6)
    setup = pair_of(port_bytes_per_s=SLOW_PORT)
    record = run(_ONE, setup, failures=FailureSpec(max_retries=1, outages=(outage,)))
    back_us = start_us + 50
    first_us = back_us + 10 if pool == "prefill" else start_us + 10
    decode_us = max(first_us, back_us) + 10
    assert times_us(record.requests.prefilled_ns) == [first_us]
    assert times_us(record.requests.first_token_ns) == [decode_us]
    assert times_us(record.requests.finished_ns) == [decode_us + 11]
    assert record.requests.num_retries.tolist() == [1]
    assert [each.num_failures for each in record.pools] == [pool == "prefill", pool == "decode"]
    assert np.sum(record.tokens.count) == 3


def test_decode_replicas_take_only_so_many_requests() -> None:
    """With one request at a time the second waits at the router of the decode pool."""
    plan = plan_of((0, 10, 3), (0, 10, 3))
    record = run(plan, pair_of(), decode_routing=RoutingSpec(max_outstanding=1))
    assert times_us(record.requests.transferred_ns) == [15.0, 26.0]
    assert times_us(record.requests.finished_ns) == [26.0, 37.0]


def test_a_preempted_request_is_computed_again_where_it_decodes() -> None:
    """Two requests of 16 tokens grow beyond the three blocks that they have together."""
    setup = pair_of(num_kv_blocks=3)
    record = run(plan_of((0, 15, 8), (0, 15, 8)), setup)
    assert record.requests.num_preemptions.tolist() == [0, 1]
    decode = record.steps[1]
    assert decode.prefill_request.tolist() == [1]
    assert record.requests.outcome.tolist() == [RequestOutcome.COMPLETED] * 2
    assert setup.pools[1].role is PoolRole.DECODE


def test_who_waits_for_room_gets_what_a_request_gives_up_whose_prefill_engine_fails() -> None:
    """There is room for one on the decode engine: the first until 15 µs, the second after.

    10 µs to move, two steps of 5.5 µs.
    """
    setup = pair_of(port_bytes_per_s=SLOW_PORT, num_kv_blocks=1)
    prefill = pool_of("prefill", role=PoolRole.PREFILL, num_replicas=2, port_bytes_per_s=SLOW_PORT)
    outage = ReplicaOutage(pool="prefill", replica=0, start_s=15e-6, restart_s=50e-6)
    record = run(
        plan_of((0, 10, 3), (0, 10, 3)),
        dataclasses.replace(setup, pools=(prefill, setup.pools[1])),
        failures=FailureSpec(max_retries=0, outages=(outage,)),
    )
    assert record.requests.outcome.tolist() == [RequestOutcome.LOST, RequestOutcome.COMPLETED]
    assert times_us(record.requests.transferred_ns)[1] == 25.0
    assert times_us(record.requests.finished_ns)[1] == 36.0


def test_the_decode_router_counts_requests_whose_cache_is_on_its_way() -> None:
    """Two prompts end together; when the second is sent nothing is on an engine yet."""
    record = run(
        plan_of((0, 10, 2), (0, 10, 2)),
        pair_of(port_bytes_per_s=SLOW_PORT, num_replicas=2),
        decode_routing=RoutingSpec(router="least_outstanding"),
    )
    assert record.requests.engine.tolist() == [1, 2]


def test_an_autoscaler_sees_requests_that_wait_for_room() -> None:
    """Three prompts end at 20 µs; one has a block to move to, two wait when it looks at 21 µs."""
    scaling = AutoscalingSpec(
        policy="queue_length", max_replicas=2, interval_s=21e-6, options={"target": "1"}
    )
    setup = pair_of(num_kv_blocks=1, num_engines=2, num_replicas=1, autoscaling=scaling)
    record = run(plan_of((0, 10, 5), (0, 10, 2), (0, 10, 2)), setup)
    assert record.pools[1].num_scale_ups == 1


def test_what_an_engine_preempted_comes_before_those_that_would_come() -> None:
    """Two answers outgrow four blocks; short requests come all the time, eight µs apart.

    Preempted once all of them have room again, one is the last to end but not behind all others.
    """
    short = [(20.0 + 8 * place, 15, 4) for place in range(60)]
    record = run(plan_of((0, 15, 40), (0, 15, 40), *short), pair_of(num_kv_blocks=4))
    is_preempted = record.requests.num_preemptions > 0
    assert is_preempted[1]
    assert np.sum(record.requests.finished_ns < record.requests.finished_ns[1]) < 10


def test_two_routers_draw_apart() -> None:
    """Of 40 requests about half, not all, go to the replica of the same place in both pools."""
    decode = pair_of(num_replicas=2)
    prefill = pool_of("prefill", role=PoolRole.PREFILL, num_replicas=2)
    record = run(
        plan_of(*[(place * 100, 10, 2) for place in range(40)]),
        dataclasses.replace(decode, pools=(prefill, decode.pools[1])),
        routing=RoutingSpec(router="random"),
        decode_routing=RoutingSpec(router="random"),
    )
    assert record.requests.prefill_engine is not None
    num_same = np.sum(record.requests.engine - record.requests.prefill_engine == 2)
    assert 10 <= num_same <= 30


def test_a_fast_port_serves_slow_ones_in_turn() -> None:
    """Four prompts of 1000 bytes end at 10 µs, each on a sender of its own: 10 µs at 100 MB/s.

    The receiver, four times as fast, is busy for 2.5 µs with each.
    """
    setup = pair_of(port_bytes_per_s=4 * SLOW_PORT)
    prefill = pool_of("prefill", role=PoolRole.PREFILL, num_replicas=4, port_bytes_per_s=SLOW_PORT)
    setup = dataclasses.replace(setup, pools=(prefill, setup.pools[1]))
    record = run(plan_of(*[(0, 10, 2)] * 4), setup)
    assert times_us(record.requests.transferred_ns) == [20.0, 22.5, 25.0, 27.5]
    assert [pool.port_busy_ns for pool in record.pools] == [40_000, 10_000]


def test_a_lost_request_reached_nothing() -> None:
    """Its cache has moved and its first token left when the decode engine fails."""
    outage = ReplicaOutage(pool="decode", replica=0, start_s=15e-6, restart_s=50e-6)
    record = run(_ONE, pair_of(), failures=FailureSpec(max_retries=0, outages=(outage,)))
    assert record.requests.outcome.tolist() == [RequestOutcome.LOST]
    for name in ("first_token_ns", "transferred_ns", "finished_ns"):
        assert getattr(record.requests, name).tolist() == [-1]
    assert len(record.tokens.request) == 0
