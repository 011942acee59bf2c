"""What holds for the report of any cluster, whatever fails in it and however it scales."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_fakes import RooflinePredictor, SilentProgress, build_scenario

from foretoken.domain.requests.cluster import (
    AutoscalingSpec,
    ClusterSpec,
    FailureSpec,
    KvTransferSpec,
    ReplicaOutage,
    ReplicaPool,
    RoutingSpec,
)
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.domain.results.report import ServingReport
from foretoken.simulator.cost.latency_surfaces import LatencySurfaces, SurfaceSpec, fetch_surfaces
from foretoken.simulator.serving.simulation import ServingResult, simulate_serving

_S_PER_HOUR = 3600
_USD_PER_HOUR = 2.0


@cache
def _fetch(spec: SurfaceSpec) -> LatencySurfaces:
    return fetch_surfaces(spec, RooflinePredictor())


@st.composite
def _pools(draw: st.DrawFn) -> tuple[ReplicaPool, ...]:
    """One or two aggregated pools, or one for prompts and one for answers."""
    roles = draw(
        st.sampled_from([("aggregated",), ("aggregated", "aggregated"), ("prefill", "decode")])
    )
    pools = []
    for number, role in enumerate(roles):
        scaling = None
        if draw(st.booleans()):
            scaling = AutoscalingSpec(
                policy="queue_length",
                max_replicas=3,
                interval_s=1.0,
                cold_start_s=draw(st.sampled_from([0.0, 1.5])),
                options={"target": "1", "scale_down_window_s": "2"},
            )
        num_replicas = draw(st.integers(1, 3))
        pools.append(
            ReplicaPool(
                name=f"p{number}", role=role, num_replicas=num_replicas, autoscaling=scaling
            )
        )
    return tuple(pools)


@st.composite
def _scenarios(draw: st.DrawFn) -> ServingScenario:
    pools = draw(_pools())
    outages = tuple(
        ReplicaOutage(
            pool=draw(st.sampled_from([pool.name for pool in pools])),
            replica=0,
            start_s=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
            restart_s=draw(st.sampled_from([0.5, 2.0])),
        )
        for _ in range(draw(st.integers(0, 2)))
    )
    failures = FailureSpec(max_retries=draw(st.integers(0, 2)), outages=outages)
    limits = RoutingSpec(
        router=draw(st.sampled_from(["round_robin", "least_outstanding", "power_of_two"])),
        max_outstanding=draw(st.sampled_from([0, 3])),
        max_queued=draw(st.sampled_from([0, 2])),
    )
    return build_scenario(
        seed=draw(st.integers(0, 3)),
        workload=WorkloadSpec(
            rate_rps=draw(st.sampled_from([2.0, 12.0, 60.0])),
            num_requests=draw(st.integers(1, 40)),
            prefill=LengthSpec(kind="uniform", minimum=1, maximum=1500),
            decode=LengthSpec(kind="uniform", minimum=1, maximum=30),
        ),
        slo=Slo(ttft_ms=300, tpot_ms=40),
        device_usd_per_hour=_USD_PER_HOUR,
        cluster=ClusterSpec(
            pools=pools,
            routing=limits,
            failures=failures,
            kv_transfer=KvTransferSpec(bandwidth_bytes_per_s=1e9, latency_us=10),
        ),
    )


def _simulate(scenario: ServingScenario) -> ServingResult:
    return simulate_serving(scenario, _fetch, SilentProgress())


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(scenario=_scenarios())
def test_a_report_of_a_cluster_adds_up(scenario: ServingScenario) -> None:
    result = _simulate(scenario)
    report, requests = result.report, result.tables["requests"]
    outcomes = requests.column("outcome").to_pylist()
    assert outcomes.count("completed") == report.num_completed
    assert report.num_completed + sum(report.num_refused_by_reason.values()) == len(outcomes)
    assert report.num_retries == sum(requests.column("num_retries").to_pylist())
    if report.num_completed == 0:
        return
    assert report.goodput_rps * report.duration_s == pytest.approx(
        report.slo_attainment_ratio * len(outcomes)
    )
    ttft_ms = [value for value in requests.column("ttft_ms").to_pylist() if value is not None]
    assert report.ttft_ms.p90 == pytest.approx(float(np.percentile(ttft_ms, 90)))
    assert sum(result.tables["series"].column("num_completions").to_pylist()) == len(ttft_ms)
    _check_pools(report)


def _check_pools(report: ServingReport) -> None:
    """Pools are the sum of their replicas, and the run is the sum of its pools."""
    for pool in report.pools:
        replicas = [engine for engine in report.engines if engine.pool == pool.name]
        assert len(replicas) == pool.num_engines
        assert sum(engine.num_requests for engine in replicas) == pool.num_requests
        assert sum(engine.running_s for engine in replicas) >= 0
        assert pool.running_engines_mean <= pool.num_engines + 1e-9
        assert pool.cost_usd == pytest.approx(_USD_PER_HOUR * pool.device_s / _S_PER_HOUR)
        assert -1e-9 <= pool.kv_utilization_ratio_mean <= 1 + 1e-9
        assert pool.mfu_ratio <= pool.utilization_ratio + 1e-9
        for engine in replicas:
            ends = [phase.end_s for phase in engine.phases]
            starts = [phase.start_s for phase in engine.phases]
            assert all(start < end for start, end in zip(starts, ends, strict=True))
            assert all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True))
    assert report.cost_usd == pytest.approx(sum(pool.cost_usd for pool in report.pools))
    assert report.num_completed <= sum(
        pool.num_requests for pool in report.pools if pool.role != "decode"
    )


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(scenario=_scenarios(), pool=st.integers(0, 1))
def test_a_dearer_pool_costs_more_by_just_its_time(scenario: ServingScenario, pool: int) -> None:
    """Prices change nothing but the bill."""
    assert scenario.cluster is not None
    pools = list(scenario.cluster.pools)
    place = min(pool, len(pools) - 1)
    pools[place] = replace(pools[place], device_usd_per_hour=2 * _USD_PER_HOUR)
    dear = replace(scenario, cluster=replace(scenario.cluster, pools=tuple(pools)))
    before, after = _simulate(scenario).report, _simulate(dear).report
    assert after.ttft_ms == before.ttft_ms
    if before.num_completed:
        extra_usd = _USD_PER_HOUR * before.pools[place].device_s / _S_PER_HOUR
        assert after.cost_usd - before.cost_usd == pytest.approx(extra_usd)
