"""Cluster scenarios from end to end, on data-sheet latencies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from serving_fakes import RooflinePredictor, SilentProgress, build_scenario, plain_engine

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.domain.requests.cluster import (
    AutoscalingSpec,
    ClusterSpec,
    FailureSpec,
    KvTransferSpec,
    LoraSpec,
    ReplicaOutage,
    ReplicaPool,
    RoutingSpec,
)
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.workload import LengthSpec, SessionSpec, WorkloadSpec
from foretoken.domain.results.report import ServingReport
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces
from foretoken.simulator.serving.simulation import simulate_serving

# Qwen2 7B: 28 layers, keys and values, 4 heads of 128, 2 bytes each.
_KV_BYTES_PER_TOKEN = 28 * 2 * 4 * 128 * 2
_LOAD = WorkloadSpec(
    arrival="poisson",
    rate_rps=6.0,
    num_requests=60,
    prefill=LengthSpec(kind="uniform", minimum=50, maximum=900),
    decode=LengthSpec(kind="uniform", minimum=1, maximum=40),
)
_PROMPTS_AND_ANSWERS = (
    ReplicaPool(name="prompts", role="prefill"),
    ReplicaPool(name="answers", role="decode", num_replicas=2),
)


def _run(
    scenario: ServingScenario, predictor: RooflinePredictor | None = None
) -> tuple[ServingReport, dict[str, pa.Table]]:
    source = predictor or RooflinePredictor()
    result = simulate_serving(scenario, lambda spec: fetch_surfaces(spec, source), SilentProgress())
    return result.report, dict(result.tables)


def _cluster(*pools: ReplicaPool, **changes: Any) -> ClusterSpec:
    return ClusterSpec(pools=pools, **changes)


def _one(prompt: int, answer: int) -> WorkloadSpec:
    return WorkloadSpec(
        arrival="constant",
        num_requests=1,
        prefill=LengthSpec(kind="fixed", mean=prompt),
        decode=LengthSpec(kind="fixed", mean=answer),
    )


def test_a_pool_of_replicas_is_what_data_parallel_replicas_are() -> None:
    """Three replicas behind a round robin give every request the same times, to the bit."""
    plain, tables = _run(build_scenario(workload=_LOAD, layout=ParallelLayout(dp=3)))
    pool = ReplicaPool(name="all", num_replicas=3)
    found, pool_tables = _run(build_scenario(workload=_LOAD, cluster=_cluster(pool)))
    names = [name for name in tables["requests"].column_names if name != "transferred_s"]
    assert pool_tables["requests"].select(names).equals(tables["requests"].select(names))
    assert found.itl_ms == plain.itl_ms
    assert found.output_throughput_tps_per_gpu == plain.output_throughput_tps_per_gpu
    assert found.utilization_ratio == pytest.approx(plain.utilization_ratio)
    assert found.mfu_ratio == pytest.approx(plain.mfu_ratio)
    assert found.num_devices == plain.num_devices == 3


def test_an_idle_cluster_moves_a_cache_in_its_bytes_over_the_bandwidth() -> None:
    """A prompt of 600 tokens over 10 GB/s, and 50 us."""
    transfer = KvTransferSpec(bandwidth_bytes_per_s=10e9, latency_us=50)
    scenario = build_scenario(
        workload=_one(600, 5), cluster=_cluster(*_PROMPTS_AND_ANSWERS, kv_transfer=transfer)
    )
    report, _ = _run(scenario)
    expected_ms = 600 * _KV_BYTES_PER_TOKEN / 10e9 * 1e3 + 0.05
    assert report.transfer_ms.max == pytest.approx(expected_ms, rel=1e-6)
    prompts, answers = report.pools
    for pool in (prompts, answers):
        assert pool.sent_bytes_per_s * report.duration_s == pytest.approx(600 * _KV_BYTES_PER_TOKEN)
    # The first token waits for it, and is handed out as the step of the second begins.
    alone, _ = _run(build_scenario(workload=_one(600, 5)))
    assert report.ttft_ms.max == pytest.approx(alone.ttft_ms.max + expected_ms, rel=1e-6)
    assert report.itl_ms.max == pytest.approx(alone.itl_ms.p50, rel=0.02)


def test_a_cache_moves_over_the_network_of_the_slower_pool() -> None:
    """A30 nodes have 12.5 GB/s and 24 us; the other pool's network is four times as fast."""
    pools = (
        ReplicaPool(name="prompts", role="prefill", device="h200_sxm"),
        ReplicaPool(name="answers", role="decode"),
    )
    report, _ = _run(build_scenario(workload=_one(1000, 3), cluster=_cluster(*pools)))
    expected_ms = 1000 * _KV_BYTES_PER_TOKEN / 12.5e9 * 1e3 + 0.024
    assert report.transfer_ms.max == pytest.approx(expected_ms, rel=1e-6)


def test_two_devices_send_their_halves_at_the_same_time() -> None:
    two = ParallelLayout(tp=2)
    transfer = KvTransferSpec(bandwidth_bytes_per_s=1e9, latency_us=1)
    pools = [replace(pool, layout=two) for pool in _PROMPTS_AND_ANSWERS]
    scenario = build_scenario(
        workload=_one(500, 3),
        topology="",
        device="a100_sxm_80",
        cluster=_cluster(*pools, kv_transfer=transfer),
    )
    report, _ = _run(scenario)
    expected_ms = 500 * _KV_BYTES_PER_TOKEN / 2e9 * 1e3 + 0.001
    assert report.transfer_ms.max == pytest.approx(expected_ms, rel=1e-6)


def test_the_report_of_a_cluster_is_consistent_with_its_tables() -> None:
    report, tables = _run(
        build_scenario(
            workload=_LOAD, cluster=_cluster(*_PROMPTS_AND_ANSWERS), slo=Slo(ttft_ms=400)
        )
    )
    requests = tables["requests"]
    column = {name: np.asarray(requests.column(name)) for name in requests.column_names}
    answer = column["num_decode_tokens"]
    moved = column["transferred_s"] >= 0
    prompts, answers = report.pools
    assert report.num_completed == len(answer)
    # One token answers never leave the pool that computes prompts.
    assert moved.tolist() == (answer > 1).tolist()
    assert prompts.num_requests == len(answer)
    assert answers.num_requests == int(moved.sum())
    assert (column["prefill_engine"][moved] == 0).all()
    assert set(column["engine"][moved]) == {1, 2}
    assert (column["transferred_s"][moved] > column["prefilled_s"][moved]).all()
    assert (column["first_token_s"][moved] >= column["transferred_s"][moved]).all()
    assert report.ttft_ms.p99 == pytest.approx(np.percentile(column["ttft_ms"], 99))
    assert report.e2e_latency_ms.p50 == pytest.approx(np.median(column["e2e_latency_ms"]))
    waits = (column["transferred_s"] - column["prefilled_s"])[moved] * 1e3
    assert report.transfer_ms.mean == pytest.approx(waits.mean())
    steps = tables["steps"].to_pydict()
    rows = {
        name: sum(
            n for n, pool in zip(steps["num_rows"], steps["pool"], strict=True) if pool == name
        )
        for name in ("prompts", "answers")
    }
    assert rows == {"prompts": len(answer), "answers": int((answer - 1).sum())}
    assert sum(tables["series"].column("num_output_tokens").to_pylist()) == int(answer.sum())
    attains = (column["ttft_ms"] <= 400).mean()
    assert report.slo_attainment_ratio == pytest.approx(attains)


def test_prefill_replicas_only_prefill_and_decode_replicas_only_decode() -> None:
    _, tables = _run(build_scenario(workload=_LOAD, cluster=_cluster(*_PROMPTS_AND_ANSWERS)))
    steps = tables["steps"].to_pydict()
    for pool, decodes, prefills in zip(
        steps["pool"], steps["num_decodes"], steps["num_prefills"], strict=True
    ):
        assert (decodes if pool == "prompts" else prefills) == 0


def test_pools_that_are_alike_are_asked_for_once() -> None:
    predictor = RooflinePredictor()
    _run(build_scenario(workload=_LOAD, cluster=_cluster(*_PROMPTS_AND_ANSWERS)), predictor)
    assert len(predictor.queries) == 1


def test_a_failed_replica_costs_while_it_restarts_and_its_requests_begin_anew() -> None:
    """The one replica fails at 2 s for 3 s: two lives cost as much time as the whole run."""
    failures = FailureSpec(
        max_retries=1, outages=(ReplicaOutage(pool="all", replica=0, start_s=2, restart_s=3),)
    )
    scenario = build_scenario(
        workload=_LOAD,
        cluster=_cluster(ReplicaPool(name="all"), failures=failures),
        device_usd_per_hour=3600.0,
    )
    report, tables = _run(scenario)
    (pool,), (engine,) = report.pools, report.engines
    assert [phase.state for phase in engine.phases] == ["running", "restarting", "running"]
    assert engine.phases[1].end_s - engine.phases[1].start_s == pytest.approx(3)
    assert (pool.num_failures, engine.num_failures) == (1, 1)
    assert report.cost_usd == pytest.approx(report.duration_s)
    restart_s = 3.0
    assert pool.running_engines_mean == pytest.approx(1 - restart_s / report.duration_s)
    retries = np.asarray(tables["requests"].column("num_retries"))
    assert report.num_retries == retries.sum() > 0
    assert report.num_completed == 60
    again = retries > 0
    first = np.asarray(tables["requests"].column("first_token_s"))[again]
    arrival = np.asarray(tables["requests"].column("arrival_s"))[again]
    # They arrived before the failure, and what users saw of it counts from there.
    assert (arrival <= 2).all()
    assert (first >= 5).all()


def test_every_request_is_completed_refused_or_lost() -> None:
    """A queue that is full rejects, and what fails without a retry is lost."""
    failures = FailureSpec(
        max_retries=0, outages=(ReplicaOutage(pool="all", replica=0, start_s=1, restart_s=1),)
    )
    routing = RoutingSpec(max_outstanding=4, max_queued=2)
    scenario = build_scenario(
        workload=replace(_LOAD, rate_rps=50.0),
        cluster=_cluster(ReplicaPool(name="all"), failures=failures, routing=routing),
    )
    report, tables = _run(scenario)
    refused = report.num_refused_by_reason
    assert refused["lost"] == 4
    assert refused["rejected"] > 0
    assert report.num_completed + sum(refused.values()) == report.num_requests == 60
    # Without objectives only those that completed attain.
    assert report.slo_attainment_ratio == pytest.approx(report.num_completed / 60)
    outcomes = tables["requests"].column("outcome").to_pylist()
    assert outcomes.count("lost") == refused["lost"]
    assert outcomes.count("rejected") == refused["rejected"]


def test_adapters_make_a_deployment_a_pool_that_loads_them() -> None:
    report, _ = _run(build_scenario(workload=_LOAD, lora=LoraSpec(num_adapters=4, max_loaded=2)))
    assert [pool.name for pool in report.pools] == ["replicas"]
    assert report.pools[0].num_adapter_loads >= 4
    assert report.num_completed == 60


def test_a_pool_that_does_not_fit_is_named() -> None:
    pools = (ReplicaPool(name="large", device="h200_sxm"), ReplicaPool(name="small"))
    scenario = build_scenario(
        cluster=_cluster(*pools), engine=plain_engine(memory_utilization_ratio=0.5)
    )
    report, tables = _run(scenario)
    assert not report.feasibility.is_feasible
    assert report.feasibility.reason.startswith("pool small: ")
    assert tables == {}


_STORE = KvTier(
    name="store",
    capacity_bytes=10**12,
    read_bytes_per_s=50e9,
    write_bytes_per_s=50e9,
    is_shared=True,
)
_ALIKE = replace(_LOAD, sessions=SessionSpec(shared_prefix_tokens=480))


def _loaded(scenario: ServingScenario) -> tuple[int, int, int]:
    """Return the tokens of all requests that were found, those from a store, and the requests."""
    _, tables = _run(scenario)
    columns = [tables["requests"][name] for name in ("num_cached_tokens", "num_loaded_tokens")]
    cached, loaded = (sum(column.to_pylist()) for column in columns)
    return cached, loaded, tables["requests"].num_rows


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
def test_replicas_of_a_pool_share_a_store(role: str) -> None:
    """A prefix of 480 tokens that all have is computed once, and read by the other replicas once.

    Requests of the first instants find it not yet written.
    """
    pools = [ReplicaPool(name="chat", role=role, num_replicas=4)]
    if role == "prefill":
        engine = plain_engine(rules={"has_prefix_caching": True})
        pools.append(ReplicaPool(name="answers", role="decode", engine=engine))
    found = []
    for tiers in ((), (_STORE,)):
        engine = replace(plain_engine(rules={"has_prefix_caching": True}), kv_tiers=tiers)
        scenario = build_scenario(workload=_ALIKE, engine=engine, cluster=_cluster(*pools))
        found.append(_loaded(scenario))
    (alone, none, num_requests), (cached, loaded, _) = found
    assert (0, (num_requests - 4) * 480) == (none, alone)
    assert (num_requests - 1) * 480 == cached
    assert 3 * 480 == loaded


def test_a_shared_store_outlives_the_replica_that_wrote_to_it() -> None:
    """The first of two replicas fails once all prompts of a minute are computed."""
    outage = ReplicaOutage(pool="chat", replica=0, start_s=60, restart_s=1)
    failures = FailureSpec(outages=(outage,))
    pool = ReplicaPool(name="chat", num_replicas=2)
    engine = replace(plain_engine(rules={"has_prefix_caching": True}), kv_tiers=(_STORE,))
    workload = replace(_ALIKE, arrival="constant", rate_rps=0.5)
    cluster = _cluster(pool, failures=failures)
    cached, loaded, num_requests = _loaded(
        build_scenario(workload=workload, engine=engine, cluster=cluster)
    )
    assert ((num_requests - 1) * 480, 2 * 480) == (cached, loaded)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pools": (ReplicaPool(name="a", layout=ParallelLayout(dp=2)),)}, "pools.a.layout.dp"),
        (
            {
                "pools": (
                    ReplicaPool(
                        name="a",
                        engine=EngineSpec(
                            profile="vllm-v0",
                            rules={"preemption": "swap"},
                            kv_tiers=(
                                KvTier(
                                    name="cpu",
                                    capacity_bytes=10**9,
                                    read_bytes_per_s=1e9,
                                    write_bytes_per_s=1e9,
                                ),
                            ),
                        ),
                    ),
                )
            },
            "pools.a.engine.kv_tiers",
        ),
        (
            {
                "pools": (
                    ReplicaPool(
                        name="a",
                        num_replicas=3,
                        autoscaling=AutoscalingSpec(policy="queue_length", max_replicas=2),
                    ),
                )
            },
            "pools.a.num_replicas",
        ),
        (
            {
                "pools": (
                    ReplicaPool(name="a", role="prefill"),
                    ReplicaPool(
                        name="b",
                        role="decode",
                        engine=plain_engine(rules={"block_size": 24}),
                    ),
                )
            },
            "pools.b.engine.block_size",
        ),
    ],
)
def test_a_cluster_that_cannot_be_simulated_says_which_key_to_change(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        _run(build_scenario(cluster=ClusterSpec(**changes)))
