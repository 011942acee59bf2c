"""Commands of servers and of training become scenarios."""

import json
from pathlib import Path

import pytest

from foretoken.app.scenario_file import build_serving_scenario, build_training_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.launch.training import read_launch


def _read(command: str) -> tuple[ServingScenario, tuple[str, ...]]:
    found = read_launch(command, {})
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
    ("command", "layout"),
    [
        ("vllm serve mixtral-8x7b --data-parallel-size 4", {"attention_dp": True, "dp": 4}),
        ("vllm serve llama-3-8b --data-parallel-size 4", {"dp": 4}),
        (
            "-m sglang.launch_server --model mixtral-8x7b --tp 8 --dp 4 --enable-dp-attention",
            {"tp": 2, "dp": 4, "attention_dp": True},
        ),
    ],
)
def test_attention_replicas_of_a_model_with_experts_share_them(
    command: str, layout: dict[str, int]
) -> None:
    scenario, _ = _read(command)
    assert ParallelLayout(**layout) == scenario.layout


def test_sglang_spreads_experts_over_all_ranks_that_exchange_tokens() -> None:
    scenario, unread = _read(
        "python3 -m sglang.launch_server --model deepseek-v3 --tp 8 --dp 8 --enable-dp-attention"
        " --moe-a2a-backend deepep --deepep-mode low_latency --enable-eplb"
        " --ep-num-redundant-experts 32"
    )
    engine = scenario.resolve_engine()
    assert (ParallelLayout(tp=1, dp=8, ep=8), ()) == (scenario.layout, unread)
    assert ("deepep_low_latency", True, 32) == (
        engine.expert_exchange,
        engine.has_expert_balancing,
        engine.num_redundant_experts,
    )


_EAGLE = {
    "vllm": (
        "vllm serve llama-3.1-8b --speculative-config"
        """ '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}'"""
    ),
    "sglang": (
        "python3 -m sglang.launch_server --model llama-3.1-8b --speculative-algorithm EAGLE3"
        " --speculative-draft-model-path HEAD --speculative-num-steps 4"
        " --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
    ),
}


@pytest.mark.parametrize("engine", sorted(_EAGLE))
def test_a_head_drafts_at_its_own_cost_where_it_is_at_hand(engine: str, tmp_path: Path) -> None:
    """As a preset, or by its `config.json`; else a remark says that a layer stands for it."""
    command = _EAGLE[engine]
    known, unread = _read(command.replace("HEAD", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"))
    assert known.speculative is not None
    assert known.speculative.draft_model is not None
    assert ("draft_model", 4, ()) == (
        known.speculative.method,
        known.speculative.num_draft_tokens,
        unread,
    )
    assert "llama-3.1-8b-eagle3" == known.speculative.draft_model.name

    config = {"model_type": "llama", "vocab_size": 128256, "draft_vocab_size": 32000}
    config |= {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    own, _ = _read(command.replace("HEAD", str(tmp_path)))
    assert own.speculative is not None
    assert own.speculative.draft_model is not None
    assert known.speculative.draft_model.extras == own.speculative.draft_model.extras

    found = read_launch(command.replace("HEAD", "some/head"), {})
    assert "layers" == found.content["speculative"]["method"]
    assert "the head some/head is no file" in found.remarks[0]
    assert () == read_launch(command.replace("HEAD", str(tmp_path)), {}).remarks


_SGLANG = "python3 -m sglang.launch_server --model"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve llama-3-8b --kv-cache-dtype fp8_e4m3", DType.FP8),
        ("vllm serve llama-3-8b --kv-cache-dtype auto", None),
        ("vllm serve llama-3.1-8b-fp8", DType.FP8),
        ("vllm serve llama-3.1-8b-fp8 --kv-cache-dtype auto", DType.FP8),
        ("vllm serve llama-3.1-8b-fp8 --kv-cache-dtype bfloat16", DType.BF16),
        (f"{_SGLANG} llama-3.1-8b-fp8 --kv-cache-dtype bf16", DType.BF16),
        (f"{_SGLANG} llama-3-8b --kv-cache-dtype fp8_e5m2", DType.FP8),
    ],
)
def test_the_kv_cache_is_the_commands_or_else_the_checkpoints(
    command: str, expected: DType | None
) -> None:
    scenario, unread = _read(command)
    assert (expected, ()) == (scenario.kv_dtype, unread)


@pytest.mark.parametrize(
    ("command", "fuses"),
    [
        ("vllm serve qwen3-30b-a3b", False),
        (
            """vllm serve qwen3-30b-a3b --compilation-config
            '{"pass_config": {"fuse_allreduce_rms": true}}'""",
            True,
        ),
        ("python3 -m sglang.launch_server --model qwen3-30b-a3b", False),
        (
            """-m sglang.launch_server --model qwen3-30b-a3b
            --enable-flashinfer-allreduce-fusion""",
            True,
        ),
    ],
)
def test_whether_sums_and_norms_are_one_kernel_is_read(command: str, *, fuses: bool) -> None:
    scenario, unread = _read(command)
    assert (fuses, ()) == (scenario.resolve_engine().fuses_all_reduce_norm, unread)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            "lmdeploy serve api_server x",
            "starts none of sglang, trtllm, vllm, deepspeed, megatron-core, torchtitan",
        ),
        ("trtllm-serve x --config y.yaml", "the command reads y.yaml: give it, too"),
        ("trtllm-serve disaggregated -c y.yaml", "starts none of sglang, trtllm"),
        ("", "give --from-command or --from-file"),
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


_MEGATRON = (
    "torchrun --nnodes=2 --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096"
    " --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --max-position-embeddings 131072 --seq-length 4096 --micro-batch-size 1"
    " --global-batch-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
    " --sequence-parallel --use-distributed-optimizer --recompute-granularity selective --bf16"
)


def test_a_command_of_megatron_is_read_with_its_model_by_its_sizes() -> None:
    found = read_launch(_MEGATRON, {})
    given = {"device": "a100_sxm_80"}
    scenario = build_training_scenario(dict(found.content), given, Path("x.yaml"))
    assert ("llama-3.1-8b", "megatron-core") == (scenario.model.name, scenario.trainer.profile)
    assert ParallelLayout(tp=2, pp=4, dp=2) == scenario.layout
    assert (1, "selective", True) == (
        scenario.zero_stage,
        scenario.recompute,
        scenario.sequence_parallel,
    )


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (_MEGATRON.replace("14336", "14337"), "its sizes are of no preset: name it"),
        (
            _MEGATRON.replace("--max-position-embeddings 131072", ""),
            "those of internlm2-7b, llama-3-8b, llama-3.1-8b, mistral-7b:",
        ),
        (_MEGATRON.replace("--seq-length 4096", ""), "an option is missing.*sequence_length"),
        (f"{_MEGATRON} --deepspeed", "deepspeed: a file or an option is missing.*deepspeed.json"),
    ],
)
def test_what_a_framework_needs_is_asked_for(command: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        read_launch(command, {})
