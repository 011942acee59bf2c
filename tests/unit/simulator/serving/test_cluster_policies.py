"""Routers, adapters and autoscalers in a running cluster, by what they do to its requests."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.requests.cluster import AutoscalingSpec, RoutingSpec
from foretoken.domain.units import NS_PER_MS
from foretoken.simulator.cluster.setup import AdapterSetup, ClusterSetup, PoolSetup
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_cluster
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests

_STEP_MS = 1.0


def _plan(arrival_ms: Sequence[float], num_prefill: int = 8, num_decode: int = 1) -> RequestPlan:
    num = len(arrival_ms)
    return plan_requests(
        np.array([round(at * NS_PER_MS) for at in arrival_ms]),
        np.full(num, num_prefill),
        np.full(num, num_decode),
    )


def _run(
    plan: RequestPlan,
    routing: RoutingSpec,
    *,
    num_replicas: int = 2,
    profile: str = "plain",
    **changes: object,
) -> ServingRecord:
    """Return what replicas did whose steps take a millisecond."""
    rules = replace(find_engine(profile), frontend_ms=0.0)
    engines = DeploymentSetup(profile=rules, num_kv_blocks=1000, num_engines=num_replicas)
    pool = PoolSetup(name="all", engines=engines, num_replicas=num_replicas)
    setup = ClusterSetup(pools=[replace(pool, **changes)], routing=routing)  # type: ignore[arg-type]
    tables = flat_tables(step_us=1000 * _STEP_MS, us_per_token=0.0)
    return run_cluster(plan, setup, [tables], lambda _: None)


def test_a_router_knows_the_loads_of_the_last_report() -> None:
    """Until 1 ms all loads are those of 0 ms, none: all go to the first. Then to the other.

    Requests take long, so what was sent stays. A router that sees loads as they are alternates.
    """
    plan = _plan([0.1 * place + 0.05 for place in range(20)], num_decode=50)
    stale = RoutingSpec(router="least_outstanding", load_interval_ms=1.0)
    assert 10 * [0] + 10 * [1] == _run(plan, stale).requests.engine.tolist()
    fresh = replace(stale, load_interval_ms=0.0)
    assert 10 * [0, 1] == _run(plan, fresh).requests.engine.tolist()


def test_a_session_stays_on_its_replica() -> None:
    """Each turn follows the one before; fewest requests alone would send all to the idle first."""
    turns, sessions = 4, 3
    first = _plan([0.0] * sessions + [0.0] * sessions * (turns - 1))
    follows = np.arange(sessions * turns) - sessions
    plan = replace(first, follows=np.where(follows < 0, -1, follows))
    record = _run(plan, RoutingSpec(router="session_sticky"), num_replicas=3)
    engines = np.reshape(record.requests.engine, (turns, sessions))
    assert [[0, 1, 2]] * turns == engines.tolist()


def test_prefix_affinity_finds_more_in_the_caches() -> None:
    """Four prompts, sent in turn: on one replica each is computed once, else once on each."""
    num = 32
    which = np.arange(num) * 7 // 5 % 4
    plan = _plan([20.0 * place for place in range(num)], num_prefill=256)
    plan = replace(plan, prefix_stream=which, prefix_tokens=np.full(num, 192))
    cached = {
        name: int(
            np.sum(
                _run(plan, RoutingSpec(router=name), profile="vllm-0.19").requests.num_cached_tokens
            )
        )
        for name in ("prefix_affinity", "round_robin")
    }
    assert (num - 4) * 192 == cached["prefix_affinity"]
    assert (num - 8) * 192 == cached["round_robin"]


@pytest.mark.parametrize(
    ("max_loaded", "first_token_ms", "num_loads"),
    # Loads at 0-5 ms, which the first and the third share, and at 5-10 ms where there is room for
    # two; with room for one the second begins when both have left, at 6 ms.
    [(1, [6, 12, 6], 2), (2, [6, 11, 6], 2)],
)
def test_requests_wait_for_their_adapters(
    max_loaded: int, first_token_ms: list[float], num_loads: int
) -> None:
    """Three requests at once for adapters 0, 1 and 0; a load takes 5 ms, an answer 1 ms."""
    plan = replace(_plan([0, 0, 0]), adapter=np.array([0, 1, 0]))
    record = _run(
        plan,
        RoutingSpec(),
        num_replicas=1,
        adapters=AdapterSetup(max_loaded=max_loaded, load_ns=5 * NS_PER_MS),
    )
    assert [at * NS_PER_MS for at in first_token_ms] == record.requests.first_token_ns.tolist()
    assert num_loads == record.pools[0].num_adapter_loads


def test_a_schedule_starts_replicas_when_it_says() -> None:
    """One replica, three from 10 ms on, which serve 4 ms later; one again from 30 ms."""
    plan = _plan([0.5 * place for place in range(80)], num_decode=3)
    spec = AutoscalingSpec(
        policy="schedule",
        max_replicas=3,
        interval_s=0.005,
        cold_start_s=0.004,
        options={"times_s": "0, 0.01, 0.03", "replicas": "1, 3, 1"},
    )
    record = _run(
        plan,
        RoutingSpec(router="round_robin"),
        num_replicas=3,
        autoscaling=spec,
    )
    engines, arrival_ms = record.requests.engine, record.requests.arrival_ns / NS_PER_MS
    assert {0, 1, 2} == set(engines[(arrival_ms > 14) & (arrival_ms < 30)].tolist())
    assert 1 == len(set(engines[arrival_ms > 30].tolist()))
