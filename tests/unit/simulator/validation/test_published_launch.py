"""How the servers of published runs were started: what their scripts set."""

from dataclasses import replace

import pytest

from foretoken.domain.measurements.estimate import DType
from foretoken.simulator.validation.published_comparison import scenario_of_published
from foretoken.simulator.validation.published_launch import development_launches, find_launch
from foretoken.simulator.validation.published_run import PublishedRun

_RUN = PublishedRun(
    name="run",
    model="llama-3.1-70b",
    device="h200_sxm",
    engine="trtllm",
    version="",
    formats=("fp8", "fp8"),
    tp=2,
    pp=1,
    dp=1,
    ep=1,
    concurrency=8,
    input_tokens=1024,
    output_tokens=1024,
    ttft_ms=100.0,
    tpot_ms=10.0,
    is_of_inference_max=True,
)


@pytest.mark.parametrize(
    ("changes", "iters"),
    [
        ({}, 20),
        ({"output_tokens": 8192}, 0),
        ({"tp": 8}, 0),
        ({"is_of_inference_max": False}, 0),
    ],
)
def test_short_prompts_wait_for_others(changes: dict[str, int], iters: int) -> None:
    """Of Llama with 1,024 tokens in and out, but on all eight devices."""
    rules = find_launch(replace(_RUN, **changes)).rules
    assert iters == int(rules.get("batch_wait_iters", 0))


def test_a_step_holds_the_longest_request_or_what_the_script_of_the_device_says() -> None:
    assert 2048 == find_launch(_RUN).step_tokens
    assert 16384 == find_launch(replace(_RUN, device="b200")).step_tokens
    assert 2048 == find_launch(replace(_RUN, device="b200", formats=("nvfp4", ""))).step_tokens
    assert 8192 == find_launch(replace(_RUN, engine="vllm")).step_tokens


def test_memory_is_what_the_script_of_a_model_gives_its_server() -> None:
    run = replace(_RUN, engine="vllm", model="minimax-m2.5")
    assert 0.95 == scenario_of_published(run).engine.memory_utilization_ratio
    assert 0.9 == find_launch(replace(run, device="h100_sxm")).memory_ratio
    assert 0 == find_launch(replace(run, is_of_inference_max=False)).memory_ratio


@pytest.mark.parametrize(
    ("day", "expected"),
    [("2026-03-28", (0, 0.95, None)), ("2026-04-03", (2048, 0.9, DType.FP8))],
)
def test_minimax_on_b200_keeps_its_cache_in_fp8_since_vllm_0_19(
    day: str, expected: tuple[int, float, DType | None]
) -> None:
    launch = find_launch(replace(_RUN, engine="vllm", model="minimax-m2.5", device="b200", day=day))
    assert expected == (launch.step_tokens, launch.memory_ratio, launch.kv_dtype)


@pytest.mark.parametrize(
    ("device", "day", "ep"),
    [
        ("b200", "2026-03-28", 2),
        ("b200", "2026-04-03", 1),
        ("h200_sxm", "2026-03-01", 1),
        ("h200_sxm", "2026-03-28", 2),
    ],
)
def test_ranks_divide_minimaxs_experts_where_its_script_said_so(
    device: str, day: str, ep: int
) -> None:
    run = replace(_RUN, engine="vllm", model="minimax-m2.5", device=device, day=day)
    assert ep == scenario_of_published(run).layout.ep


@pytest.mark.parametrize(
    ("device", "concurrency", "interval"),
    [("b200", 8, 10), ("b200", 16, 30), ("h200_sxm", 16, 1), ("gb200", 16, 1)],
)
def test_large_models_look_for_requests_rarely_on_b200(
    device: str, concurrency: int, interval: int
) -> None:
    run = replace(
        _RUN, engine="sglang", model="deepseek-v3", device=device, concurrency=concurrency
    )
    assert interval == int(find_launch(run).rules.get("receive_interval", 1))


@pytest.mark.parametrize(
    ("model", "weights", "device", "kv_dtype", "fuses", "interval"),
    [
        ("glm-5", "fp8", "b200", DType.FP8, "true", None),
        ("glm-5", "nvfp4", "b200", DType.FP8, "true", "10"),
        ("glm-5", "fp8", "h200_sxm", None, None, None),
        ("qwen3.5-397b-a17b", "", "b200", None, "true", "10"),
        ("qwen3.5-397b-a17b", "fp8", "b200", DType.FP8, "false", "10"),
        ("qwen3.5-397b-a17b", "nvfp4", "b200", DType.FP8, "false", "30"),
        ("qwen3.5-397b-a17b", "fp8", "h200_sxm", DType.FP8, "true", None),
    ],
)
def test_checkpoints_of_a_model_are_started_by_scripts_of_their_own(
    model: str,
    weights: str,
    device: str,
    kv_dtype: DType | None,
    fuses: str | None,
    interval: str | None,
) -> None:
    run = replace(_RUN, engine="sglang", model=model, device=device, formats=(weights, weights))
    launch = find_launch(run)
    assert (kv_dtype, fuses, interval) == (
        launch.kv_dtype,
        launch.rules.get("fuses_all_reduce_norm"),
        launch.rules.get("receive_interval"),
    )
    assert (32768 if device == "b200" else 0 if model == "glm-5" else 16384) == launch.step_tokens


@pytest.mark.parametrize(
    ("device", "kv_dtype", "rules"),
    [
        ("h100_sxm", None, {}),
        ("h200_sxm", DType.FP8, {}),
        ("b200", DType.FP8, {"graph_mode": "full", "fuses_all_reduce_norm": "true"}),
    ],
)
def test_llama_under_vllm_is_scheduled_ahead(
    device: str, kv_dtype: DType | None, rules: dict[str, str]
) -> None:
    launch = find_launch(replace(_RUN, engine="vllm", device=device))
    assert {"has_async_scheduling": "true", **rules} == launch.rules
    assert (0.9, kv_dtype) == (launch.memory_ratio, launch.kv_dtype)


def test_replicas_of_attention_wait_for_each_other() -> None:
    run = replace(_RUN, model="deepseek-v3", tp=1, dp=8, ep=8)
    assert ("60", DType.FP8) == (
        find_launch(run).rules["balance_timeout_iters"],
        find_launch(run).kv_dtype,
    )
    assert {} == find_launch(replace(run, tp=8, dp=1)).rules


def test_a_launch_is_what_is_simulated() -> None:
    run = replace(_RUN, engine="sglang", model="glm-5")
    scenario = scenario_of_published(run)
    assert (0.85, 5 * 8) == (
        scenario.engine.memory_utilization_ratio,
        scenario.workload.num_requests,
    )
    waiting = scenario_of_published(_RUN)
    assert "20" == waiting.engine.rules["batch_wait_iters"]
    assert (2048, DType.FP8) == (waiting.engine.max_num_batched_tokens, waiting.kv_dtype)


def test_a_prompt_joins_those_that_run_where_none_is_split() -> None:
    """As the scripts start TensorRT-LLM, and AIConfigurator's generator all engines."""
    run = replace(_RUN, model="gpt-oss-120b", device="b200", input_tokens=8192)
    assert 8192 + 7 <= find_launch(run).step_tokens < 8192 + 200
    other = replace(_RUN, is_of_inference_max=False)
    assert 2560 == find_launch(other).step_tokens
    assert 8 + 1024 + 1500 == find_launch(replace(other, engine="vllm")).step_tokens
    mixed = find_launch(replace(other, engine="sglang", input_tokens=1000)).rules
    assert {"mixes_prefill": "true"} == mixed


def test_rows_that_predictions_were_developed_on_have_a_launch_each() -> None:
    launches = development_launches()
    assert {"vllm", "sglang", "trtllm"} == {engine for engine, _ in launches}
    deepseek = launches["trtllm", "DeepSeek-V3"]
    sizes = {"concurrency": 8, "max_num_seqs": 64, "input_tokens": 8192}
    assert (8320, 0.8) == (deepseek.step_tokens.limit(sizes), deepseek.shortest_ratio)


@pytest.mark.parametrize(
    ("day", "is_of_inference_max", "pads"),
    [("2026-03-07", False, True), ("2026-03-17", False, False), ("2026-03-17", True, True)],
)
def test_the_generator_of_march_2026_left_batches_between_sizes_without_a_graph(
    day: str, is_of_inference_max: bool, pads: bool
) -> None:
    run = replace(_RUN, version="1.3.0rc1", day=day, is_of_inference_max=is_of_inference_max)
    engine = scenario_of_published(run).engine.resolve()
    assert pads is engine.pads_to_graphs
    assert (engine.graph_capture_sizes == (1, 2, 4, 8, 16, 32, 64, 128, 256)) is not pads
