import pytest

from foretoken.domain.estimate import DType
from foretoken.domain.graph import BatchShape, RankContext
from foretoken.domain.hardware.device import find_device
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.lowering import LoweringOptions, lower_rank
from foretoken.domain.memory import ServingMemory, plan_serving_memory
from foretoken.domain.models.architecture import find_model
from foretoken.domain.scenario import EngineSpec
from foretoken.domain.units import GIB

_ENGINE = EngineSpec(max_num_batched_tokens=2048, max_num_seqs=256)


def _plan(
    model: str, layout: ParallelLayout, device: str, stage: int = 0, dtype: DType = DType.BF16
) -> ServingMemory:
    architecture = find_model(model)
    rank = RankContext(model=architecture, layout=layout, devices_per_node=8, stage=stage)
    options = LoweringOptions(dtype=dtype, has_kv_cache=True, has_sampler=True)
    shape = BatchShape(num_tokens=2048, num_output_rows=256)
    nodes = lower_rank(shape, options, rank)
    return plan_serving_memory(nodes, architecture.hidden, _ENGINE, find_device(device))


def test_weights_are_the_parameters_of_the_model() -> None:
    """Llama 3 8B has 8.03 billion parameters, of which norms are a few hundred thousand."""
    memory = _plan("llama-3-8b", ParallelLayout(), "a100_sxm_80")
    assert memory.weights_bytes == pytest.approx(2 * 8.03e9, rel=2e-3)


def test_tied_embeddings_count_once_on_a_device_and_twice_over_stages() -> None:
    model = find_model("qwen2-0.5b")
    assert model.has_tied_embedding
    whole = _plan("qwen2-0.5b", ParallelLayout(), "a30").weights_bytes
    halves = [_plan("qwen2-0.5b", ParallelLayout(pp=2), "a30", stage) for stage in (0, 1)]
    embedding_bytes = 2 * model.vocab * model.hidden
    assert sum(half.weights_bytes for half in halves) == whole + embedding_bytes
    assert whole == pytest.approx(2 * 0.494e9, rel=2e-3)


def test_tensor_parallelism_splits_weights_and_cache() -> None:
    one = _plan("llama-3-70b", ParallelLayout(), "h100_sxm")
    four = _plan("llama-3-70b", ParallelLayout(tp=4), "h100_sxm")
    assert four.weights_bytes == pytest.approx(one.weights_bytes / 4, rel=1e-3)
    assert four.kv_bytes_per_token == one.kv_bytes_per_token / 4
    # 80 layers, 8 key heads, keys and values of 128 features in 2 bytes.
    assert one.kv_bytes_per_token == 80 * 8 * 2 * 128 * 2


def test_key_heads_are_repeated_when_there_are_too_few() -> None:
    two = _plan("qwen2-0.5b", ParallelLayout(tp=2), "a30")
    assert two.kv_bytes_per_token == 24 * 1 * 2 * 64 * 2


def test_what_weights_and_activations_leave_holds_blocks() -> None:
    memory = _plan("qwen2-7b", ParallelLayout(), "a30")
    left = 0.9 * find_device("a30").memory_bytes - memory.weights_bytes - memory.activations_bytes
    assert memory.infeasibility == ""
    assert memory.num_kv_blocks(16) == int(left // (16 * 28 * 4 * 2 * 128 * 2))


def test_activations_are_the_residual_stream_and_the_widest_operator() -> None:
    """The two halves of the gated MLP and their product are the widest of Llama 2."""
    memory = _plan("llama-2-7b", ParallelLayout(), "a30")
    assert memory.activations_bytes == 2 * 2048 * (4096 + 3 * 11008)


def test_weights_that_do_not_fit_leave_no_blocks_and_say_why() -> None:
    memory = _plan("llama-3-70b", ParallelLayout(), "h100_sxm")
    assert memory.num_kv_blocks(16) == 0
    assert f"{memory.weights_bytes / GIB:.2f} GiB" in memory.infeasibility


def test_logits_in_fp32_can_be_the_largest_activation() -> None:
    architecture = find_model("qwen2-0.5b")
    engine = EngineSpec(max_num_batched_tokens=256, max_num_seqs=256)
    rank = RankContext(model=architecture, layout=ParallelLayout(), devices_per_node=1)
    options = LoweringOptions(dtype=DType.BF16, has_kv_cache=True, has_sampler=True)
    nodes = lower_rank(BatchShape(num_tokens=256, num_output_rows=256), options, rank)
    memory = plan_serving_memory(nodes, architecture.hidden, engine, find_device("a30"))
    residual_bytes = 2 * 256 * architecture.hidden
    assert memory.activations_bytes == residual_bytes + 2 * 4 * 256 * architecture.vocab
