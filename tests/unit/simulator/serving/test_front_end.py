"""A server tokenizes one prompt after the other and hands one after the other over."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.requests.cluster import RoutingSpec
from foretoken.simulator.cluster.setup import ClusterSetup, PoolSetup
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_cluster, run_deployment
from foretoken.simulator.workload.request_plan import plan_requests

_PROFILE = EngineProfile(name="mine", engine="mine", max_num_seqs=8, frontend_ms=0.05)
_ARRIVAL_NS, _PROMPTS = np.array([0, 0, 1_000, 500_000]), np.array([10, 20, 10, 10])


def _queued_ns(num_servers: int, is_cluster: bool, **rules: Any) -> list[int]:
    """Return when engines that wait find each request, which has a token of an answer."""
    profile = replace(_PROFILE, **rules)
    plan = plan_requests(_ARRIVAL_NS, _PROMPTS, 0 * _PROMPTS + 1)
    engines = DeploymentSetup(profile=profile, num_kv_blocks=1000, num_engines=num_servers)
    tables = flat_tables(0.001, 0.0)
    if is_cluster:
        pool = PoolSetup(name="all", engines=engines, num_replicas=num_servers)
        setup = ClusterSetup(pools=[pool], routing=RoutingSpec(router="round_robin"))
        record = run_cluster(plan, setup, [tables], lambda _: None)
    else:
        record = run_deployment(plan, engines, tables, lambda _: None)
    queued_ns: list[int] = record.requests.queued_ns.tolist()
    return queued_ns


@pytest.mark.parametrize("is_cluster", [False, True])
def test_prompts_are_tokenized_one_after_the_other(is_cluster: bool) -> None:
    """A µs a token: 10, 20 and 10 one after the other, then 50 more that keep nobody waiting."""
    expected = [60_000, 80_000, 90_000, 560_000]
    assert expected == _queued_ns(1, is_cluster, frontend_us_per_token=1.0)


@pytest.mark.parametrize("is_cluster", [False, True])
def test_requests_are_handed_over_while_others_are_tokenized(is_cluster: bool) -> None:
    """Two µs a token to hand over: the second, tokenized at 30, goes from 30 to 70 µs."""
    expected = [80_000, 120_000, 140_000, 580_000]
    rules = {"frontend_us_per_token": 1.0, "executor_us_per_token": 2.0}
    assert expected == _queued_ns(1, is_cluster, **rules)


@pytest.mark.parametrize("is_cluster", [False, True])
def test_each_replica_has_a_server(is_cluster: bool) -> None:
    expected = [60_000, 70_000, 70_000, 560_000]
    assert expected == _queued_ns(2, is_cluster, frontend_us_per_token=1.0)
