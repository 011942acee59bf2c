"""Commands of servers become scenarios."""

from pathlib import Path

import pytest

from foretoken.app.scenario_file import build_serving_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.scenario import ServingScenario
from foretoken.simulator.launch.read import read_serving_command


def _read(command: str) -> tuple[ServingScenario, tuple[str, ...]]:
    found = read_serving_command(command)
    given = {"device": "h200_sxm"}
    return build_serving_scenario(dict(found.content), given, Path("x.yaml")), found.unread


def test_vllm_is_read_with_short_names_equals_signs_and_what_is_not_ours() -> None:
    scenario, unread = _read(
        "HF_TOKEN=x vllm serve meta-llama/Llama-3.1-8B -tp 2 --data_parallel_size=2 \\\n"
        "  --max-num-seqs 64 --no-enable-prefix-caching --enforce-eager --api-key secret"
        " --dtype auto --gpu-memory-utilization 0.8 --enable-lora --max-loras 4"
    )
    assert ParallelLayout(tp=2, dp=2) == scenario.layout
    assert "llama-3.1-8b" == scenario.model.name
    engine = scenario.engine.resolve()
    assert (64, 0.8) == (engine.max_num_seqs, engine.memory_utilization_ratio)
    assert (False, "none") == (engine.has_prefix_caching, engine.graph_mode)
    assert scenario.lora is not None
    assert (4, 4) == (scenario.lora.max_loaded, scenario.lora.num_adapters)
    assert {"api-key", "dtype"} == set(unread)


def test_what_a_command_leaves_out_is_the_profiles() -> None:
    scenario, unread = _read("python3 -m vllm.entrypoints.openai.api_server --model llama-3.1-8b")
    other, _ = _read("vllm serve llama-3.1-8b")
    assert () == unread
    assert scenario == other
    assert ("vllm-0.20", 0, 0) == (
        scenario.engine.profile,
        scenario.engine.max_num_seqs,
        scenario.engine.max_num_batched_tokens,
    )


def test_sglang_counts_the_ranks_of_attention_and_experts_together() -> None:
    scenario, _ = _read(
        "python3 -m sglang.launch_server --model deepseek-v3 --tp 8 --dp 8 --ep 8"
        " --enable-dp-attention --speculative-algorithm EAGLE --speculative-num-draft-tokens 3"
    )
    assert ParallelLayout(tp=1, dp=8, ep=8) == scenario.layout
    assert scenario.speculative is not None
    assert ("layers", 2) == (scenario.speculative.method, scenario.speculative.num_draft_tokens)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("trtllm-serve x", "starts none of sglang, vllm"),
        ("vllm serve 'x", "No closing quotation"),
        (
            'vllm serve x --kv-transfer-config \'{"kv_role": "kv_producer"}\'',
            "starts the prefill pool",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(command: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        _read(command)
