"""What runs again in the backward pass, and what is kept because of it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_memory_graphs import chunk_graphs, memory_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.lowering.graph import Section
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.simulator.steps.held.saved_tensor import list_saved
from foretoken.simulator.steps.recompute import (
    LAYER_INPUT,
    RECOMPUTE_MODULES,
    RecomputePlan,
    find_modules,
)


def _plan(model: str = "llama-3.2-1b", **changes: object) -> RecomputePlan:
    return chunk_graphs(memory_scenario(model, **changes))[0].plan


def _roles(plan: RecomputePlan) -> set[str]:
    return {node.role for node in plan.recomputed}


def test_nothing_runs_again_without_recomputation() -> None:
    graph = chunk_graphs(memory_scenario())[0]
    assert graph.plan.recomputed == ()
    assert graph.plan.saved == list_saved(graph.forward, memory_scenario())


@pytest.mark.parametrize(("dtype", "num_kept"), [(DType.BF16, 0), (DType.FP8, 1)])
def test_in_8_bit_attention_keeps_its_output_unless_it_runs_again(
    dtype: DType, num_kept: int
) -> None:
    """The projection after it keeps a copy in 8 bit."""
    plan = _plan(dtype=dtype)
    again = _plan(dtype=dtype, recompute="selective", recompute_modules=("core_attention",))
    outputs = [
        [tensor for tensor in found.saved if tensor.role == tensor.producer]
        for found in (plan, again)
    ]
    assert [num_kept, 0] == list(map(len, outputs))
    assert all(tensor.num_bytes == 2 * 1024 * 2048 for tensor in outputs[0])


@settings(max_examples=20)
@given(
    st.sampled_from(("llama-3.2-1b", "gpt-neox-20b", "mixtral-8x7b", "deepseek-v3")),
    st.sampled_from(("selective", "full")),
    st.integers(0, 8),
)
def test_what_is_not_kept_is_rebuilt(model: str, recompute: str, recompute_layers: int) -> None:
    """Kept and rebuilt tensors together are those of a pass without recomputation."""
    scenario = memory_scenario(model, recompute=recompute, recompute_layers=recompute_layers)
    graph = chunk_graphs(scenario)[0]
    whole = sum(tensor.total_bytes for tensor in list_saved(graph.forward, scenario))
    parts = (*graph.plan.saved, *graph.plan.rebuilt)
    together = sum(part.total_bytes for part in parts if part.role != LAYER_INPUT)
    assert together == whole


@given(st.integers(1, 15))
def test_more_recomputed_layers_keep_less_and_run_more(count: int) -> None:
    fewer = _plan(recompute="full", recompute_layers=count)
    more = _plan(recompute="full", recompute_layers=count + 1)
    kept = [sum(tensor.total_bytes for tensor in plan.saved) for plan in (fewer, more)]
    assert kept[1] < kept[0]
    assert {node.repeat for node in fewer.recomputed} == {count}
    assert {node.repeat for node in more.recomputed} == {count + 1}


def test_full_recomputation_repeats_the_collectives_of_layers() -> None:
    plan = _plan(recompute="full", tp=4, sequence_parallel=True)
    collectives = {n.role for n in plan.recomputed if find_operator(n.operator).is_collective}
    assert collectives == {
        "attn_qkv_proj_input_all_gather",
        "attn_out_proj_reduce_scatter",
        "mlp_up_proj_input_all_gather",
        "mlp_down_proj_reduce_scatter",
    }
    assert {node.group for node in plan.recomputed} == {"recompute"}
    assert not {"embedding", "lm_head", "loss"} & _roles(plan)


def test_partitioned_activations_are_split_and_gathered_again() -> None:
    whole = _plan(recompute="full", tp=4)
    split = _plan(recompute="full", tp=4, partitions_activations=True)
    assert _layer_input(whole) == 4 * _layer_input(split)
    gather = split.recomputed[0]
    assert (gather.role, gather.axis) == ("layer_input_all_gather", "tp")
    assert gather.dims["message_bytes"] == _layer_input(whole)


def _layer_input(plan: RecomputePlan) -> int:
    return next(tensor.num_bytes for tensor in plan.saved if tensor.role == LAYER_INPUT)


def test_selective_recomputation_gives_up_the_scores_of_unfused_attention() -> None:
    unfused = TrainerSpec(rules={"attention": "unfused"})
    plan = _plan("gpt-neox-20b", trainer=unfused, recompute="selective")
    rebuilt = {tensor.role for tensor in plan.rebuilt}
    assert rebuilt == {"attn_softmax"}
    assert {"attn_scores", "attn_softmax", "attn_values"} <= _roles(plan)
    assert "mlp_up_proj" not in _roles(plan)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("profile", ["megatron-lm-2021", "megatron-lm-2022"])
def test_a_layer_keeps_what_its_authors_counted(profile: str, recompute: str) -> None:
    """A layer of a GPT keeps s b h (34 + 5 a s / h) bytes, 34 s b h of these after recomputation.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    2022, equations 1 and 6; statistics of norms are not counted there.
    """
    trainer = TrainerSpec(profile=profile)
    scenario = memory_scenario("gpt2-xl", trainer=trainer, recompute=recompute)
    plan, hidden = chunk_graphs(scenario)[0].plan, scenario.model.hidden
    num_tokens = scenario.micro_batch_size * scenario.sequence_length
    scores = 5 * scenario.model.num_heads * scenario.sequence_length / hidden
    per_layer = sum(t.num_bytes for t in plan.saved if t.section is Section.LAYER)
    statistics = 2 * 2 * 4 * num_tokens
    expected = num_tokens * hidden * (34 + (scores if recompute == "none" else 0))
    assert per_layer - statistics == expected


@pytest.mark.parametrize(
    ("module", "model", "given_up"),
    [
        ("layernorm", "llama-3.2-1b", {"attn_qkv_proj", "mlp_up_proj"}),
        ("mlp", "llama-3.2-1b", {"mlp_activation", "mlp_down_proj"}),
        ("moe_act", "mixtral-8x7b", {"moe_down_proj"}),
        ("mla_up_proj", "deepseek-v3", {"attn_q_proj", "attn_kv_proj", "mla_prefill"}),
        ("shared_experts", "deepseek-v3", {"shared_activation", "shared_down_proj"}),
    ],
)
def test_a_module_gives_up_what_it_makes(module: str, model: str, given_up: set[str]) -> None:
    plan = _plan(model, recompute="selective", recompute_modules=(module,))
    assert {tensor.role for tensor in plan.rebuilt} == given_up
    assert all(RECOMPUTE_MODULES[module].has(role) for role in _roles(plan))


def test_an_unknown_module_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="core_attention"):
        find_modules(("mlp", "attention"))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="selective"):
        chunk_graphs(replace(memory_scenario(), recompute="some"))


def _by_operator(rules: dict[str, str] | None = None, **changes: object) -> RecomputePlan:
    trainer = TrainerSpec(profile="torchtitan", rules=rules or {})
    return _plan("llama-3-8b", trainer=trainer, recompute="selective", **changes)


@pytest.mark.parametrize(("keeps_unread", "width"), [("true", 2), ("false", 1)])
def test_every_other_product_of_a_layer_is_kept(keeps_unread: str, width: int) -> None:
    """Llama 3 8B: the layer's input, queries, values, the gate, and attention's output.

    The output of the layer's last product is read by nobody; eager PyTorch keeps it.
    """
    plan = _by_operator({"keeps_unread_outputs": keeps_unread})
    num_tokens, hidden, of_keys, intermediate = 1024, 4096, 1024, 14336
    of_attention = 2 * hidden + 4 * 32
    expected = 2 * (hidden * (1 + width) + of_keys + intermediate) + of_attention
    per_layer = sum(t.num_bytes for t in plan.saved if t.section is Section.LAYER)
    assert per_layer == num_tokens * expected


def test_every_other_product_of_a_layer_runs_again() -> None:
    """Keys are a sixth of a fused product of 32 + 8 + 8 heads, the up half one of two."""
    shares = {node.role: node.share for node in _by_operator().recomputed}
    assert shares == {
        "input_norm": 1,
        "attn_qkv_proj": pytest.approx(1 / 6),
        "attn_rope": 1,
        "attn_out_proj": 1,
        "attn_residual": 1,
        "post_attention_norm": 1,
        "mlp_up_proj": 0.5,
        "mlp_activation": 1,
        "mlp_product": 1,
    }


def test_gathers_run_again_and_reduce_scatters_are_kept() -> None:
    plan = _by_operator(tp=2, sequence_parallel=True)
    collectives = {n.role for n in plan.recomputed if find_operator(n.operator).is_collective}
    assert collectives == {"attn_qkv_proj_input_all_gather", "mlp_up_proj_input_all_gather"}
    kept = {tensor.producer: tensor.num_bytes for tensor in plan.saved}
    assert kept["attn_out_proj_reduce_scatter"] == 2 * 1024 * 4096 / 2


def test_whole_layers_end_where_nothing_more_is_needed() -> None:
    """The input of the last product is all that its backward pass needs."""
    early = {"ends_recompute_early": "true"}
    plan = _plan(recompute="full", trainer=TrainerSpec(rules=early))
    assert _roles(_plan(recompute="full")) - _roles(plan) == {"mlp_down_proj", "mlp_residual"}


def test_operators_are_chosen_alone_or_by_module() -> None:
    with pytest.raises(InvalidRequestError, match="name it alone"):
        _by_operator(recompute_modules=("every_other_matmul", "mlp"))


def test_products_in_8_bit_are_none_of_those_that_are_kept() -> None:
    """`_scaled_mm` is not in torchtitan's list: a layer's input and attention's output stay."""
    plan = _by_operator({"keeps_unread_outputs": "false"}, dtype=DType.FP8)
    per_layer = sum(t.num_bytes for t in plan.saved if t.section is Section.LAYER)
    assert per_layer == 1024 * (2 * 4096 + 2 * 4096 + 4 * 32)
    shares = {node.role: node.share for node in plan.recomputed if node.operator == "gemm"}
    assert shares == {"attn_qkv_proj": 1, "attn_out_proj": 1, "mlp_up_proj": 1}
