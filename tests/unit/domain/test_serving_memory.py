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
    lowered = dict(options or {})
    request_tokens = lowered.pop("request_tokens", 0.0)
    layout = ParallelLayout(**degrees)
    rank = RankContext(model=architecture, layout=layout, devices_per_node=8, stage=stage)
    chosen = LoweringOptions(
        dtype=DType.BF16,
        has_kv_cache=True,
        has_sampler=True,
        fuses_add_norm=True,
        **lowered,
    )
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    shape = BatchShape(
        num_tokens=tokens,
        num_output_rows=seqs,
        prefill=PrefillShape(num_seqs=1, q_tokens=tokens, kv_tokens=tokens, score_pairs=tokens),
        decode=DecodeShape(num_seqs=seqs, kv_tokens=seqs, kv_tokens_max=1),
    )
    nodes = lower_rank(shape, chosen, rank)
    return plan_serving_memory(nodes, rank, engine, find_device(device), request_tokens)


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


def test_experts_that_compute_piece_by_piece_keep_buffers_for_a_piece() -> None:
    """Mixtral's 8,192 tokens go to 2 experts each: inputs and outputs of 7,168 of 14,336 columns.

    A quarter of them is computed at a time.
    """
    whole, pieces = (
        _plan(
            "mixtral-8x7b",
            engine=dataclasses.replace(_H100_ENGINE, expert_chunk_tokens=tokens),
            tp=2,
        )
        for tokens in (0, 2048)
    )
    buffer_bytes = 2 * 8192 * 2 * (7168 + 2 * 7168)
    assert whole.activations_bytes - pieces.activations_bytes == 3 / 4 * buffer_bytes
    assert whole == _plan(
        "mixtral-8x7b", engine=dataclasses.replace(_H100_ENGINE, expert_chunk_tokens=8192), tp=2
    )


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
    """Of short requests all that may run have room; a step's prompts are whole for a while."""
    memory = _plan("gpt-oss-20b", options={"quantization": "mxfp4", "request_tokens": 1000})
    assert 12 * 8 * 2 * 64 * 2 == memory.kv_bytes_per_token
    held = 256 * (128 + 16) + 2048
    assert held * memory.kv_bytes_per_token == memory.window_bytes
    brief = _plan("gpt-oss-20b", options={"quantization": "mxfp4", "request_tokens": 50})
    assert (256 * 50 + 2048) * memory.kv_bytes_per_token == brief.window_bytes
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


def test_a_router_in_fp32_is_held_so() -> None:
    """Of 62 layers with 256 experts each, whatever the model's other weights are stored in."""
    model = find_model("minimax-m2.5")
    (layer,) = model.layers
    experts = layer.feed_forward
    dims = {**experts.dims, "has_fp32_router": 0}
    plain = dataclasses.replace(layer, feed_forward=dataclasses.replace(experts, dims=dims))
    held, halved = (
        _plan(one, "h200_sxm", ep=8, dp=8).weights_bytes
        for one in (model, dataclasses.replace(model, layers=(plain,)))
    )
    assert 62 * 256 * 3072 * 2 == held - halved


def test_where_states_alone_are_too_many_fewer_sequences_help() -> None:
    """Weights take more, and without states they fit."""
    engine = dataclasses.replace(_ENGINE, max_num_seqs=256)
    memory = _plan("qwen3.5-35b-a3b", "h100_sxm", engine)
    assert memory.weights_bytes > memory.state_bytes > 0
    assert memory.infeasibility.endswith("; lower max_num_seqs")
    fewer = dataclasses.replace(engine, max_num_seqs=16)
    assert "" == _plan("qwen3.5-35b-a3b", "h100_sxm", fewer).infeasibility


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


@pytest.mark.parametrize("num_seqs", [4, 64, 1024])
@pytest.mark.parametrize("request_tokens", [500.0, 20_000.0, 200_000.0])
def test_long_windows_share_the_memory_of_the_other_tokens(
    num_seqs: int, request_tokens: float
) -> None:
    """As many requests as fit have their chunk of 8192 tokens, and no more than may run."""
    engine = dataclasses.replace(_ENGINE, max_num_seqs=num_seqs)
    memory = _plan(
        "llama-4-scout-17b-16e",
        "h200_sxm",
        engine,
        options={"request_tokens": request_tokens},
        tp=8,
    )
    whole, windows = 12 * 2 * 128 * 2, 36 * 2 * 128 * 2
    assert (whole, windows) == (memory.kv_bytes_per_token, memory.window_bytes_per_token)
    held = memory.window_bytes - windows * engine.max_num_batched_tokens
    num_requests = held / windows / min(8192 + engine.block_size, request_tokens)
    fitting = memory.kv_bytes / (whole * request_tokens)
    assert 1 <= num_requests <= num_seqs
    assert pytest.approx(num_requests) == min(fitting, num_seqs)


def test_an_engine_with_a_pool_for_windows_has_a_share_of_the_tokens_there() -> None:
    """SGLang's 0.8, whatever its requests are like."""
    engine = dataclasses.replace(_ENGINE, window_tokens_ratio=0.8)
    for request_tokens in (500.0, 200_000.0):
        memory = _plan(
            "llama-4-scout-17b-16e",
            "h200_sxm",
            engine,
            options={"request_tokens": request_tokens},
            tp=8,
        )
        num_tokens = memory.kv_bytes / memory.kv_bytes_per_token
        in_windows = memory.window_bytes / memory.window_bytes_per_token
        assert pytest.approx(0.8) == in_windows / num_tokens


def test_tensorrt_llm_keeps_every_token_of_layers_with_a_window() -> None:
    """What a server of its release 1.1.0rc3 logs of gpt-oss-120b: 73,728 bytes a token."""
    memory = _plan("gpt-oss-120b", "h200_sxm", find_engine("trtllm-1.0"), tp=4)
    assert 73_728 / 4 == memory.kv_bytes_per_token + memory.window_bytes_per_token
    in_windows = memory.window_bytes / memory.window_bytes_per_token
    assert pytest.approx(in_windows) == memory.kv_bytes / memory.kv_bytes_per_token


@pytest.mark.parametrize("num_seqs", [8, 256])
@pytest.mark.parametrize("request_tokens", [500.0, 50_000.0])
def test_states_of_running_requests_lie_with_their_tokens(
    num_seqs: int, request_tokens: float
) -> None:
    """Of Qwen3.5 35B-A3B: those that fit have a state; elsewhere all that may run have one."""
    shared, apart = (
        _plan(
            "qwen3.5-35b-a3b",
            engine=dataclasses.replace(_ENGINE, max_num_seqs=num_seqs, shares_states=shares),
            options={"request_tokens": request_tokens},
            tp=2,
        )
        for shares in (True, False)
    )
    state = shared.state_bytes_per_request
    assert num_seqs * state == apart.state_bytes
    fitting = shared.kv_bytes / (shared.kv_bytes_per_token * request_tokens)
    assert pytest.approx(min(fitting, num_seqs)) == shared.state_bytes / state
    assert apart.kv_bytes <= shared.kv_bytes


def test_more_requests_than_states_do_not_start() -> None:
    """vLLM refuses: lower max_num_seqs."""
    engine = dataclasses.replace(_ENGINE, max_num_seqs=20_000, shares_states=True)
    memory = _plan("qwen3.5-35b-a3b", engine=engine, tp=2)
    assert "lower max_num_seqs" in memory.infeasibility


def test_gemma_holds_no_less_than_vllm_logs_and_no_more_than_without_windows() -> None:
    """Its log counts a whole step's tokens in the windows of every request, not of those of one.

    Source: vLLM 0.19, `v1/kv_cache_interface.py` (SlidingWindowSpec.max_memory_usage_bytes).
    """
    engine = dataclasses.replace(
        find_engine("vllm-0.20"), max_num_batched_tokens=8192, max_num_seqs=1024
    )
    memory = _plan("gemma-4-31b-nvfp4", "h200_sxm", engine)
    assert (10 * 8192, 50 * 16384) == (memory.kv_bytes_per_token, memory.window_bytes_per_token)
    length = find_model("gemma-4-31b-nvfp4").max_position
    pool_bytes = memory.kv_bytes + memory.window_bytes
    whole, windows = length * 10 * 8192, 50 * 16384
    logged = pool_bytes / (whole + windows * (1024 - 1 + 8192)) * length
    held = memory.kv_bytes / memory.kv_bytes_per_token
    assert logged < held < pool_bytes / (10 * 8192)
    # As if no layer had a window it would be a ninth or less.
    assert 9 * pool_bytes / (10 * 8192 + windows) < held


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
