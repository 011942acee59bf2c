"""What a rank of a serving engine holds, against what vLLM logged."""

import dataclasses
from typing import Any

import pytest

from foretoken.domain.frameworks.engine import EngineProfile, find_engine
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import BatchShape, DecodeShape, PrefillShape, RankContext
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.memory import UNLIMITED_BLOCKS, ServingMemory, plan_serving_memory
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.requests.cluster import LoraSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.units import GIB

_ENGINE = dataclasses.replace(
    find_engine("vllm-0.19"), max_num_batched_tokens=2048, max_num_seqs=256
)
# The limits vLLM 0.19 takes on an H100, where the figures below were logged.
_H100_ENGINE = dataclasses.replace(_ENGINE, max_num_batched_tokens=8192, max_num_seqs=1024)
_LLAMA = find_model("llama-3.1-8b")


def _plan(
    model: str | ModelArchitecture,
    device: str = "h100_sxm",
    engine: EngineProfile = _ENGINE,
    *,
    stage: int = 0,
    options: dict[str, Any] | None = None,
    **degrees: int,
) -> ServingMemory:
    architecture = find_model(model) if isinstance(model, str) else model
    layout = ParallelLayout(**degrees)
    rank = RankContext(model=architecture, layout=layout, devices_per_node=8, stage=stage)
    chosen = LoweringOptions(
        dtype=DType.BF16,
        has_kv_cache=True,
        has_sampler=True,
        fuses_add_norm=True,
        **(options or {}),
    )
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    shape = BatchShape(
        num_tokens=tokens,
        num_output_rows=seqs,
        prefill=PrefillShape(num_seqs=1, q_tokens=tokens, kv_tokens=tokens, score_pairs=tokens),
        decode=DecodeShape(num_seqs=seqs, kv_tokens=seqs, kv_tokens_max=1),
    )
    nodes = lower_rank(shape, chosen, rank)
    return plan_serving_memory(nodes, rank, engine, find_device(device))


def test_weights_are_the_parameters_and_the_rotation() -> None:
    """vLLM logs 14.99 GiB for Llama 3.1 8B; 131,072 positions of 128 features rotate."""
    memory = _plan(_LLAMA)
    assert 2 * 8_030_261_248 + 2 * 131072 * 128 == memory.weights_bytes
    assert pytest.approx(14.989, abs=1e-3) == memory.weights_bytes / GIB


# Peak activations on an H100 with 1,024 sequences and 8,192 tokens, in GiB, as vLLM 0.19 logs them.
# Source: accuracy report of llm-d's capacity planner for vLLM 0.19.0, sections 1 and 2.
@pytest.mark.parametrize(
    ("model", "degrees", "expected_gib"),
    [
        ("llama-3.1-8b", {}, 1.89),
        ("llama-3.1-8b", {"tp": 4}, 1.89),
        ("llama-3.1-8b", {"pp": 4}, 1.05),
        ("qwen2.5-7b", {}, 2.21),
        ("qwen3-14b", {}, 2.23),
        ("qwen2.5-72b", {"tp": 4}, 2.29),
        ("qwen3-30b-a3b", {}, 2.68),
        ("mixtral-8x7b", {"tp": 2}, 1.21),
    ],
)
def test_activations_are_what_the_engine_logs(
    model: str, degrees: dict[str, Any], expected_gib: float
) -> None:
    memory = _plan(model, engine=_H100_ENGINE, **degrees)
    assert pytest.approx(expected_gib, rel=0.01) == memory.activations_bytes / GIB


def test_quantized_experts_keep_no_buffers() -> None:
    """2.87 GiB for gpt-oss-20b in the same report."""
    memory = _plan("gpt-oss-20b", engine=_H100_ENGINE, options={"quantization": "mxfp4"}, tp=2)
    assert pytest.approx(2.87, rel=0.01) == memory.activations_bytes / GIB


def test_a_layer_is_the_peak_where_the_vocabulary_is_small() -> None:
    """0.77 GiB for CodeLlama 7B in the same report: its vocabulary has 32,016 entries."""
    memory = _plan("llama-2-7b", engine=_H100_ENGINE)
    assert pytest.approx(0.77, rel=0.01) == memory.activations_bytes / GIB


def test_the_capacity_of_a_real_engine_is_met() -> None:
    """vLLM 0.19 had 2,588 blocks for Llama 3.1 8B on an RTX 4090; the parts add up to 7 % more."""
    memory = _plan(_LLAMA, "rtx_4090")
    assert pytest.approx(2588, rel=0.07) == memory.num_kv_blocks(16)


def test_tied_embeddings_count_once_on_a_device_and_twice_over_stages() -> None:
    model = find_model("qwen2-0.5b")
    assert model.has_tied_embedding
    rotation_bytes = 2 * model.max_position * model.head_dim
    whole = _plan(model, "a30").weights_bytes
    halves = [_plan(model, "a30", pp=2, stage=stage).weights_bytes for stage in (0, 1)]
    assert whole + 2 * model.vocab * model.hidden + rotation_bytes == sum(halves)


def test_tensor_parallelism_splits_weights_and_cache() -> None:
    one, four = _plan("llama-3-70b"), _plan("llama-3-70b", tp=4)
    assert pytest.approx(one.weights_bytes / 4, rel=1e-3) == four.weights_bytes
    assert one.kv_bytes_per_token / 4 == four.kv_bytes_per_token
    # 80 layers, 8 key heads, keys and values of 128 features in 2 bytes.
    assert 80 * 8 * 2 * 128 * 2 == one.kv_bytes_per_token


def test_ranks_that_communicate_need_more() -> None:
    alone, pair = _plan(_LLAMA), _plan(_LLAMA, tp=2)
    assert alone.reserved_bytes + _ENGINE.collective_bytes == pair.reserved_bytes
    assert alone.reserved_bytes == _plan(_LLAMA, pp=2).reserved_bytes


def test_key_heads_are_repeated_when_there_are_too_few() -> None:
    assert 24 * 1 * 2 * 64 * 2 == _plan("qwen2-0.5b", "a30", tp=2).kv_bytes_per_token


def test_a_narrow_cache_holds_twice_the_tokens() -> None:
    plain, narrow = _plan(_LLAMA), _plan(_LLAMA, options={"kv_dtype": DType.FP8})
    assert plain.kv_bytes_per_token == 2 * narrow.kv_bytes_per_token


def test_latent_attention_keeps_one_vector_per_token() -> None:
    for form in ("module", "operators"):
        memory = _plan("deepseek-v3", "b200", options={"mla_form": form}, tp=8)
        assert 61 * (512 + 64) * 2 == memory.kv_bytes_per_token


def test_layers_with_a_window_keep_a_part_for_every_sequence() -> None:
    memory = _plan("gpt-oss-20b", options={"quantization": "mxfp4"})
    assert 12 * 8 * 2 * 64 * 2 == memory.kv_bytes_per_token
    assert 256 * (128 + 16) * memory.kv_bytes_per_token == memory.window_bytes
    always = dataclasses.replace(_LLAMA, sliding_window=4096)
    assert (0, _plan(_LLAMA).kv_bytes_per_token) == (
        _plan(always).window_bytes,
        _plan(always).kv_bytes_per_token,
    )


def test_a_stage_of_windows_alone_sets_no_limit() -> None:
    """Every other layer of gpt-oss-20b has a window; each of 24 stages holds one layer."""
    windows, whole = (_plan("gpt-oss-20b", pp=24, stage=stage) for stage in (0, 1))
    assert 0 == windows.kv_bytes_per_token
    assert UNLIMITED_BLOCKS == windows.num_kv_blocks(16)
    assert 0 < whole.num_kv_blocks(16) < UNLIMITED_BLOCKS
    assert 0 == dataclasses.replace(windows, usable_bytes=0).num_kv_blocks(16)


def test_a_model_of_windows_alone_keeps_all_tokens() -> None:
    """The only layer of a model of one has a window: nothing else would bound the cache."""
    model = dataclasses.replace(find_model("gpt-oss-20b"), num_layers=1)
    assert 0 < _plan(model).kv_bytes_per_token


def test_four_bits_with_scales_are_a_quarter_and_a_little() -> None:
    """Of the blocks' weights; embedding and head stay."""
    memory = _plan("llama-3-70b", options={"quantization": "int4_wo"})
    kept = 2 * 2 * 128256 * 8192
    assert pytest.approx(kept + (2 * 70.55e9 - kept) * 0.2598, rel=2e-3) == memory.weights_bytes


@pytest.mark.parametrize("rule", ["utilization", "static", "free"])
def test_the_cache_gets_what_the_rule_leaves(rule: str) -> None:
    memory = _plan(_LLAMA, engine=dataclasses.replace(_ENGINE, memory_rule=rule))
    held = memory.weights_bytes + memory.reserved_bytes
    running = memory.activations_bytes + memory.graphs_bytes
    expected = {
        "utilization": 0.9 * memory.device_bytes - held - running,
        "static": 0.9 * memory.device_bytes - held,
        "free": 0.9 * (memory.device_bytes - memory.context_bytes - held - running),
    }
    assert pytest.approx(expected[rule]) == memory.kv_bytes
    assert int(memory.kv_bytes // (16 * memory.kv_bytes_per_token)) == memory.num_kv_blocks(16)


def test_graphs_take_their_share_of_the_weights() -> None:
    engine = dataclasses.replace(_ENGINE, graph_bytes_ratio=0.05)
    memory = _plan(_LLAMA, engine=engine)
    assert 0.05 * memory.weights_bytes == memory.graphs_bytes
    assert _plan(_LLAMA).kv_bytes - memory.graphs_bytes == pytest.approx(memory.kv_bytes)


def test_weights_that_do_not_fit_leave_no_blocks_and_say_what_helps() -> None:
    memory = _plan("llama-3-70b")
    assert 0 == memory.num_kv_blocks(16)
    assert f"weights {memory.weights_bytes / GIB:.2f} GiB" in memory.infeasibility
    assert "spread the model over more devices" in memory.infeasibility
    assert "" == _plan("llama-3-70b", tp=4).infeasibility


def test_activations_that_do_not_fit_say_what_helps() -> None:
    wide = dataclasses.replace(_ENGINE, max_num_batched_tokens=2**19)
    assert "lower max_num_batched_tokens" in _plan(_LLAMA, "rtx_4090", wide).infeasibility
    static = dataclasses.replace(
        wide, max_num_batched_tokens=2**16, memory_rule="static", memory_utilization_ratio=0.95
    )
    reason = _plan(_LLAMA, "rtx_4090", static).infeasibility
    assert "activations and graphs" in reason
    assert "lower memory_utilization_ratio" in reason


def test_adapters_take_room_of_the_kv_cache_and_are_named_where_they_do_not_fit() -> None:
    """Rank 16 over all layers of Llama 3.1 8B is 83,886,080 B, for each that is held."""
    lora = LoraSpec(num_adapters=100, rank=16, max_loaded=10)
    plain, with_lora = _plan(_LLAMA), _plan(_LLAMA, options={"lora": lora})
    assert 10 * 83_886_080 == with_lora.adapters_bytes
    assert plain.kv_bytes - 10 * 83_886_080 == with_lora.kv_bytes
    many = _plan(_LLAMA, options={"lora": dataclasses.replace(lora, max_loaded=1000)})
    assert "weights 14.99 GiB, LoRA adapters 78.12 GiB" in many.infeasibility
    assert "lower lora.max_loaded or lora.rank" in many.infeasibility


def test_long_windows_lie_with_the_other_tokens() -> None:
    """Whole chunks of 8192 tokens for 1024 sequences are more than what weights leave."""
    more = dataclasses.replace(_ENGINE, max_num_seqs=1024)
    chunked = _plan("llama-4-scout-17b-16e", "h200_sxm", more, tp=8)
    assert (0, 0) == (chunked.window_bytes, chunked.window_bytes_per_token)
    assert 48 * 2 * 128 * 2 == chunked.kv_bytes_per_token
    fewer = dataclasses.replace(_ENGINE, max_num_seqs=8)
    apart = _plan("llama-4-scout-17b-16e", "h200_sxm", fewer, tp=8)
    assert (12 * 2 * 128 * 2, 36 * 2 * 128 * 2) == (
        apart.kv_bytes_per_token,
        apart.window_bytes_per_token,
    )


def test_a_load_balancer_holds_redundant_experts_and_a_layer_to_receive() -> None:
    """Of Qwen3 30B-A3B on eight ranks: 16 experts a layer and rank, 18 with 16 copies."""
    engine = dataclasses.replace(_ENGINE, has_expert_balancing=True, num_redundant_experts=16)
    options = {"has_expert_balancing": True, "num_redundant_experts": 16}
    plain, balanced = (
        _plan("qwen3-30b-a3b", dp=8, ep=8),
        _plan("qwen3-30b-a3b", engine=engine, options=options, dp=8, ep=8),
    )
    expert_bytes = 2 * 3 * 2048 * 768
    assert 48 * 2 * expert_bytes == balanced.weights_bytes - plain.weights_bytes
    assert 18 * expert_bytes == balanced.reserved_bytes - plain.reserved_bytes
