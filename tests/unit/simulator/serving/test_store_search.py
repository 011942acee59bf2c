"""Searches for deployments whose replicas share a store of KV blocks."""

from dataclasses import replace
from typing import cast

import pytest
from serving_fakes import RooflinePredictor, build_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.domain.models.architecture import find_model
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.search import (
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
)
from foretoken.domain.requests.workload import LengthSpec, SessionSpec, WorkloadSpec
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import ServingSearch, candidate_scenario
from foretoken.simulator.serving.engine_limit import check_engines

_STORE = KvTier(
    name="store",
    capacity_bytes=10**12,
    read_bytes_per_s=25e9,
    write_bytes_per_s=25e9,
    is_shared=True,
)


def _request(mode: str) -> ServingSearchRequest:
    workload = WorkloadSpec(
        num_requests=24, prefill=LengthSpec(mean=2000), decode=LengthSpec(mean=50)
    )
    return ServingSearchRequest(
        scenario=build_scenario(
            model=find_model("qwen2-7b"),
            device="h100_sxm",
            engine=EngineSpec(profile="vllm-0.25", kv_tiers=(_STORE,)),
            workload=workload,
        ),
        space=ServingSpace(max_devices=4, tp=(1,), max_num_seqs=(4,), modes=(mode,)),
        num_finalists=1,
    )


def test_finalists_are_simulated_with_the_store_where_prompts_are_computed() -> None:
    """All replicas together, for they know of each other; what decodes reads no prompt from it."""
    for mode in ("aggregated", "disaggregated"):
        request = _request(mode)
        search = ServingSearch(cast("PredictorPort", RooflinePredictor()))
        (finalist,) = search.run(request, InlineContext()).finalists
        assert finalist.report.feasibility.is_feasible
        assert 4 == finalist.report.num_devices
        scenario = candidate_scenario(request, finalist.candidate, search)
        pools = scenario.cluster.pools if scenario.cluster else ()
        engines = [pool.engine or scenario.engine for pool in pools] or [scenario.engine]
        assert 1 == sum(engine.kv_tiers == (_STORE,) for engine in engines)
        assert all(
            pool.role != "decode" or not pool.engine.kv_tiers for pool in pools if pool.engine
        )


def _compare(profile: str, *kv_tiers: str) -> ServingSearchReport:
    """Return what is found of conversations on four replicas that take turns."""
    request = _request("aggregated")
    sessions = SessionSpec(turns=LengthSpec(mean=4), shared_prefix_tokens=1000)
    scenario = replace(
        request.scenario,
        engine=EngineSpec(profile=profile),
        workload=replace(request.scenario.workload, sessions=sessions, rate_rps=2.0),
    )
    space = replace(request.space, max_num_batched_tokens=(2048,), kv_tiers=kv_tiers)
    request = replace(request, scenario=scenario, space=space, num_finalists=len(kv_tiers))
    search = ServingSearch(cast("PredictorPort", RooflinePredictor()))
    return search.run(request, InlineContext())


def test_simulation_ranks_the_tiers_that_the_closed_form_finds_equal() -> None:
    """Replicas read each other's turns in a store; hosts get nothing, for nothing is evicted."""
    host, store = "cpu:64e9:25e9", "store:1e12:25e9:shared"
    report = _compare("vllm-0.25", "none", host, store)
    assert {"none", host, store} == set(report.candidates.kv_tiers)
    assert [f"4 x tp1 b4 {text}" for text in (store, "none", host)] == [
        finalist.name for finalist in report.finalists
    ]
    assert report.finalists[0].name == report.best
    shared, plain, own = (finalist.report.steady.ttft_ms.mean for finalist in report.finalists)
    assert shared < plain == own


def test_tiers_that_a_release_does_not_have_are_not_proposed() -> None:
    columns = _compare("vllm-0.19", "none", "store:1e12:25e9:shared").candidates
    verdicts = dict(zip(columns.kv_tiers, columns.verdict, strict=True))
    assert {"none": "ok", "store:1e12:25e9:shared": "engine"} == verdicts


def test_tiers_that_would_hold_nothing_are_not_proposed() -> None:
    """Nor are they simulated: an engine without a prefix cache puts no blocks into them."""
    host = "cpu:64e9:25e9"
    columns = _compare("orca", "none", host).candidates
    assert {"none": "ok", host: "engine"} == dict(
        zip(columns.kv_tiers, columns.verdict, strict=True)
    )
    engine = EngineSpec(profile="plain").with_tiers(host)
    with pytest.raises(InvalidRequestError, match="neither caches prefixes nor swaps"):
        check_engines(replace(_request("aggregated").scenario, engine=engine))
