"""What a serving engine cannot do is refused, left out of searches, and never written."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_fakes import RooflinePredictor

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec, all_engines
from foretoken.domain.hardware.device import all_devices
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.cluster import ClusterSpec, LoraSpec, ReplicaPool, SpeculativeSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest, ServingSpace
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.launch.deployment import LaunchOptions, write_deployment
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import search_serving
from foretoken.simulator.search.serving.space import check_bases
from foretoken.simulator.serving.engine_limit import check_engines
from foretoken.simulator.serving.scenario_check import check_scenario

_LAYERS = SpeculativeSpec(method="layers")
_SPREAD = {"dp": 4, "ep": 4}
_DEEPEP = {"expert_exchange": "deepep_low_latency"}
_HALVES = {"two_batch_tokens": "32"}
_DCP = {"decode_context_parallel": "2"}
_EPLB = {"has_expert_balancing": "true", "num_redundant_experts": "4"}
_POOLS = ClusterSpec(
    pools=(
        ReplicaPool(name="prefill", role="prefill"),
        ReplicaPool(name="decode", role="decode"),
    )
)


def _scenario(
    profile: str, layout: ParallelLayout, rules: dict[str, str] | None = None, **changes: Any
) -> ServingScenario:
    return ServingScenario(
        model=find_model("mixtral-8x7b"),
        device="h100_sxm",
        engine=EngineSpec(profile=profile, rules=rules or {}),
        layout=layout,
        workload=WorkloadSpec(num_requests=4),
        **changes,
    )


@pytest.mark.parametrize(
    ("profile", "layout", "changes", "key"),
    [
        ("vllm-0.20", {"tp": 2, "pp": 2}, {"speculative": SpeculativeSpec()}, "layout.pp"),
        ("vllm-0.20", {"tp": 4, "ep": 2}, {}, "layout.ep"),
        ("vllm-0.20", {}, {"kv_dtype": DType.INT8}, "kv_dtype"),
        ("vllm-0.20", {}, {"dtype": DType.TF32}, "dtype"),
        ("vllm-v0", {"tp": 2, "ep": 2}, {}, "layout.ep"),
        ("vllm-v0", {"dp": 2, "attention_dp": True}, {}, "layout.dp"),
        ("vllm-v0", {}, {"cluster": _POOLS}, "cluster.pools"),
        ("sglang-0.5", {"pp": 2}, {"speculative": SpeculativeSpec()}, "layout.pp"),
        ("lightllm", {"pp": 2}, {}, "layout.pp"),
        ("orca", {}, {"quantization": "fp8"}, "quantization"),
        ("sarathi", {}, {"lora": LoraSpec(num_adapters=2)}, "lora"),
        ("vllm-0.8", _SPREAD, {"rules": _DEEPEP}, "engine.rules.expert_exchange"),
        ("vllm-0.8", _SPREAD, {"rules": _EPLB}, "engine.rules.has_expert_balancing"),
        ("sglang-0.5", {"tp": 4, "ep": 2}, {"rules": _DEEPEP}, "engine.rules.expert_exchange"),
        ("sglang-0.5", {"tp": 8}, {"rules": _DCP}, "engine.rules.decode_context_parallel"),
        ("trtllm-1.0", _SPREAD, {"rules": _DEEPEP | _HALVES}, "engine.rules.two_batch_tokens"),
        ("vllm-0.20", _SPREAD, {"rules": _HALVES}, "engine.rules.two_batch_tokens"),
        (
            "sglang-0.5",
            {"tp": 4, "ep": 4},
            {"rules": _DEEPEP | _HALVES},
            "engine.rules.two_batch_tokens",
        ),
    ],
)
def test_what_an_engine_lacks_names_the_key_to_change(
    profile: str, layout: dict[str, int], changes: dict[str, Any], key: str
) -> None:
    """The rules of no engine have no bounds, nor has a profile whose bounds are lifted."""
    scenario = _scenario(profile, ParallelLayout(**layout), **changes)
    with pytest.raises(InvalidRequestError, match=r"engine\.profile=plain") as refused:
        check_scenario(scenario)
    assert key in {violation.field for violation in refused.value.violations}
    lifted = replace(scenario.engine, rules={**scenario.engine.rules, "can": "{}"})
    for engine in (lifted, replace(scenario.engine, profile="plain")):
        check_engines(replace(scenario, engine=engine))


def test_contexts_that_ranks_split_lie_in_no_store_of_sglang() -> None:
    scenario = _scenario("sglang-0.5.20", ParallelLayout(tp=8), rules=_DCP)
    check_engines(replace(scenario, engine=scenario.engine.with_tiers("host:64e9:25e9")))
    shared = replace(scenario, engine=scenario.engine.with_tiers("store:64e9:25e9:shared"))
    with pytest.raises(InvalidRequestError, match="the store has no pieces of contexts"):
        check_engines(shared)


def _helix(device: str, *split: str, **changes: Any) -> ServingScenario:
    layout = ParallelLayout(tp=8)
    own = EngineSpec(profile="trtllm-1.3", rules=_DCP)
    pools = tuple(
        ReplicaPool(name=role, role=role, engine=own if role in split else None)
        for role in ("prefill", "decode")
    )
    scenario = _scenario("trtllm-1.3", layout, cluster=ClusterSpec(pools=pools), **changes)
    return replace(scenario, device=device)


def test_contexts_of_tensorrt_llm_are_split_where_servers_decode_for_others() -> None:
    check_engines(_helix("b200", "decode"))
    with pytest.raises(InvalidRequestError, match="decode for others"):
        check_engines(_helix("b200", "prefill", "decode"))
    alone = _scenario("trtllm-1.3", ParallelLayout(tp=8), rules=_DCP)
    with pytest.raises(InvalidRequestError, match="decode for others"):
        check_engines(replace(alone, device="b200"))
    with pytest.raises(InvalidRequestError, match="on Blackwell alone"):
        check_engines(_helix("h200_sxm", "decode"))
    with pytest.raises(InvalidRequestError, match="do not speculate"):
        check_engines(_helix("b200", "decode", speculative=_LAYERS))


@pytest.mark.parametrize(
    ("profile", "layout", "changes"),
    [
        ("vllm-0.20", {"tp": 4, "ep": 4}, {"kv_dtype": DType.FP8, "cluster": _POOLS}),
        ("vllm-0.20", {"tp": 2, "dp": 2, "ep": 4}, {"speculative": _LAYERS}),
        ("sglang-0.5", {"tp": 4, "ep": 2}, {}),
        # Data-parallel replicas need nothing of an engine.
        ("sarathi", {"tp": 2, "pp": 2, "dp": 4}, {"kv_dtype": DType.BF16}),
        ("trtllm-1.0", {"pp": 2}, {"kv_dtype": DType.INT8, "cluster": _POOLS}),
        ("vllm-0.20", _SPREAD, {"rules": _DEEPEP | _EPLB | _HALVES}),
        ("sglang-0.5", _SPREAD, {"rules": _DEEPEP | _EPLB}),
        ("sglang-0.5.20", {"tp": 8}, {"rules": _DCP}),
    ],
)
def test_what_an_engine_has_is_not_refused(
    profile: str, layout: dict[str, int], changes: dict[str, Any]
) -> None:
    check_engines(_scenario(profile, ParallelLayout(**layout), **changes))


def test_every_engine_says_what_it_can_and_where_that_was_read() -> None:
    for name, profile in all_engines().items():
        assert (name != "plain") == bool(profile.can.has) == bool(profile.can.source)


@pytest.mark.parametrize(
    ("profile", "device", "runs"),
    [
        ("trtllm-1.3", "mi300x", "what runs on mi300x is orca, plain, sarathi, sglang, vllm"),
        ("trtllm-1.0", "gaudi3", "what runs on gaudi3 is orca, plain, sarathi, vllm"),
        ("sglang-0.5.20", "gaudi3", "what runs on gaudi3 is orca, plain, sarathi, vllm"),
        ("lightllm", "b60", "what runs on b60 is orca, plain, sarathi, sglang, vllm"),
    ],
)
def test_an_engine_is_refused_on_a_device_it_does_not_run_on(
    profile: str, device: str, runs: str
) -> None:
    scenario = replace(_scenario(profile, ParallelLayout()), device=device)
    with pytest.raises(InvalidRequestError, match=runs) as refused:
        check_scenario(scenario)
    assert "device" in {violation.field for violation in refused.value.violations}


def test_a_search_leaves_out_devices_that_an_engine_does_not_run_on() -> None:
    space = {"devices": ("h200_sxm", "mi300x"), "tp": (1,), "modes": ("aggregated",)}
    assert ({("aggregated", 1)}, {"engine": 1}) == _search("trtllm-1.3", **space)
    assert ({("aggregated", 1)}, {}) == _search("vllm-0.20", **space)


def test_a_search_is_refused_where_none_of_its_devices_runs_the_engine() -> None:
    scenario = replace(_scenario("trtllm-1.3", ParallelLayout()), device="mi300x")
    for devices in (("mi300x", "h200_sxm"), ("h200_sxm",)):
        check_bases(ServingSearchRequest(scenario=scenario, space=ServingSpace(devices=devices)))
    for devices in ((), ("mi300x", "gaudi3")):
        asked = ServingSearchRequest(scenario=scenario, space=ServingSpace(devices=devices))
        with pytest.raises(InvalidRequestError, match="what runs on mi300x is"):
            check_bases(asked)
    others = ServingSpace(devices=("mi300x",), profiles=("trtllm-1.3", "vllm-0.20"))
    check_bases(ServingSearchRequest(scenario=scenario, space=others))


def test_every_device_says_what_programs_it() -> None:
    platforms = {device.platform for device in all_devices().values()}
    assert {"cuda", "rocm", "xpu", "hpu", "cpu"} == platforms


def test_a_server_is_not_written_for_what_it_lacks(tmp_path: Path) -> None:
    """Experts over two of four ranks are SGLang's to spread, not vLLM's."""
    scenario = _scenario("sglang-0.5", ParallelLayout(tp=4, ep=2))
    assert write_deployment(scenario, tmp_path / "own")
    with pytest.raises(InvalidRequestError, match=r"layout\.ep: vllm"):
        write_deployment(scenario, tmp_path / "other", LaunchOptions(engine="vllm"))


@settings(max_examples=25, deadline=None)
@given(
    profile=st.sampled_from([name for name in all_engines() if name.startswith(("vllm", "sgl"))]),
    layout=st.builds(
        ParallelLayout,
        tp=st.sampled_from((1, 2, 4)),
        pp=st.sampled_from((1, 2)),
        ep=st.sampled_from((1, 2, 4)),
    ),
    formats=st.fixed_dictionaries(
        {
            "quantization": st.sampled_from(("", "fp8", "fp8_block", "int4_wo")),
            "dtype": st.sampled_from((DType.BF16, DType.FP16, DType.TF32)),
            "kv_dtype": st.sampled_from((None, DType.FP8, DType.INT8)),
            "speculative": st.sampled_from((None, SpeculativeSpec(), _LAYERS)),
            "lora": st.sampled_from((None, LoraSpec(num_adapters=2))),
        }
    ),
)
def test_all_that_an_engine_has_is_written(
    profile: str, layout: ParallelLayout, formats: dict[str, Any]
) -> None:
    """Nothing else is: whatever a server lacks is refused before files are."""
    scenario = _scenario(profile, layout, **formats)
    try:
        check_engines(scenario)
    except InvalidRequestError:
        has_all = False
    else:
        has_all = True
    with TemporaryDirectory() as folder:
        if has_all:
            assert write_deployment(scenario, Path(folder))
        else:
            with pytest.raises(InvalidRequestError):
                write_deployment(scenario, Path(folder))


def _search(profile: str, **space: Any) -> tuple[set[tuple[str, int]], dict[str, int]]:
    request = ServingSearchRequest(
        scenario=_scenario(profile, ParallelLayout()),
        space=ServingSpace(max_num_seqs=(8,), max_num_batched_tokens=(2048,), **space),
        num_finalists=0,
    )
    report = search_serving(request, RooflinePredictor(), InlineContext())
    columns = report.candidates
    ranked = {
        (str(mode), int(ep))
        for mode, ep, rank in zip(columns.mode, columns.ep, columns.rank, strict=True)
        if rank
    }
    return ranked, dict(report.num_ruled_out_by_verdict)


def test_a_search_counts_what_an_engine_lacks_and_proposes_the_rest() -> None:
    ranked, out = _search("vllm-0.20", tp=(4,), ep=(1, 2, 4), modes=("aggregated",))
    assert ({("aggregated", 1), ("aggregated", 4)}, {"engine": 1}) == (ranked, out)
    # Pairs of a pool with each number of prompts, and none of an engine without pools.
    ranked, out = _search("vllm-v0", tp=(4,))
    assert {("aggregated", 1)} == ranked
    assert {"engine"} == set(out)


def test_a_search_is_bounded_by_the_server_that_is_to_run_its_answer() -> None:
    """By the rules of no engine experts are spread over any ranks."""
    degrees = {"tp": (4,), "ep": (2, 4), "modes": ("aggregated",)}
    assert {("aggregated", 2), ("aggregated", 4)} == _search("plain", **degrees)[0]
    assert {("aggregated", 4)} == _search("plain", server="vllm", **degrees)[0]
