"""Searches for deployments whose replicas share a store of KV blocks."""

from typing import cast

from serving_fakes import RooflinePredictor, build_scenario

from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.domain.models.architecture import find_model
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.search import ServingSearchRequest, ServingSpace
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import ServingSearch, candidate_scenario

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
