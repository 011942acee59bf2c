"""A layer under the rules of a training framework: which kernels run forward and backward."""

import dataclasses
from collections.abc import Mapping

import pytest

from foretoken.domain.frameworks.trainer import TrainerSpec, all_trainers
from foretoken.domain.lowering.graph import (
    BatchShape,
    OperatorNode,
    PrefillShape,
    RankContext,
    Section,
)
from foretoken.domain.lowering.lower import lower_backward, lower_rank
from foretoken.domain.lowering.options import (
    LoweringOptions,
    Nodes,
    TrainingOptions,
)
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout

_NEOX = find_model("gpt-neox-20b")
_LLAMA = find_model("llama-3-8b")
_NUM_SEQS, _LENGTH = 4, 2048
_TOKENS = _NUM_SEQS * _LENGTH
_BATCH = BatchShape(
    num_tokens=_TOKENS,
    num_output_rows=_TOKENS,
    prefill=PrefillShape(**prefill_dims(_NUM_SEQS, _LENGTH, 0)),
)


def _options(profile: str = "gpt-neox", dtype: DType = DType.FP16, **rules: str) -> LoweringOptions:
    training = TrainingOptions(
        trainer=TrainerSpec(profile=profile, rules=rules).resolve(),
        micro_batch_size=_NUM_SEQS,
        sequence_length=_LENGTH,
    )
    return LoweringOptions(dtype=dtype, has_loss=True, training=training)


def _lower(
    model: ModelArchitecture, options: LoweringOptions, **degrees: int
) -> tuple[Nodes, Nodes]:
    rank = RankContext(model=model, layout=ParallelLayout(**degrees), devices_per_node=8)
    forward = lower_rank(_BATCH, options, rank)
    return forward, lower_backward(forward, options)


def _layer(nodes: Nodes) -> list[str]:
    return [node.role for node in nodes if node.section is Section.LAYER]


def _by_role(nodes: Nodes) -> Mapping[str, OperatorNode]:
    return {node.role: node for node in nodes}


def test_gpt_neox_runs_small_kernels_apart() -> None:
    """The kernels of one layer in traces of GPT-NeoX-20B, copies to the device left out."""
    forward, _ = _lower(_NEOX, _options(), tp=4)
    expected = [
        "input_norm",
        "attn_qkv_proj",
        "attn_rope",
        "attn_scores",
        "attn_softmax",
        "attn_values",
        "attn_context_copy",
        "attn_out_proj",
        "attn_out_bias",
        "post_attention_norm",
        "mlp_up_proj",
        "mlp_activation",
        "mlp_down_proj",
        "mlp_down_proj_all_reduce",
        "mlp_down_bias",
        "branch_sum",
        "mlp_residual",
    ]
    assert expected == _layer(forward)


def test_a_parallel_residual_is_reduced_once_forward_and_twice_backward() -> None:
    forward, backward = _lower(_NEOX, _options(), tp=4)
    counts = [
        sum(node.operator == "all_reduce" and node.section is Section.LAYER for node in nodes)
        for nodes in (forward, backward)
    ]
    assert [1, 2] == counts


def test_separate_accumulation_adds_up_every_weight() -> None:
    forward, backward = _lower(_NEOX, _options())
    added = {
        node.role.removesuffix("_accumulate").removesuffix("_backward"): node.dims["num_params"]
        for node in backward
        if node.role.endswith("_accumulate")
    }
    expected = {
        node.role: find_operator(node.operator).num_weights(node.dims)
        for node in forward
        if find_operator(node.operator).num_weights(node.dims)
    }
    assert expected == added


def test_a_plain_framework_adds_no_kernels_to_a_layer() -> None:
    forward, backward = _lower(_LLAMA, _options("plain", DType.BF16))
    expected = [
        "input_norm",
        "attn_qkv_proj",
        "attn_rope",
        "attention_prefill",
        "attn_out_proj",
        "attn_residual",
        "post_attention_norm",
        "mlp_up_proj",
        "mlp_activation",
        "mlp_down_proj",
        "mlp_residual",
    ]
    assert expected == _layer(forward)
    # An embedding's gradient has no product that could add it: zeros of 2 bytes, and 10 in fp32.
    added = {n.role: n.dims["num_params"] for n in backward if "accumulate" in n.role}
    assert {"embedding_accumulate": 2 * _LLAMA.vocab * _LLAMA.hidden} == added
    assert {""} == {node.variant for node in (*forward, *backward)}


@pytest.mark.parametrize("name", sorted(all_trainers()))
@pytest.mark.parametrize("model", [_NEOX, _LLAMA, find_model("gpt2-xl")], ids=lambda m: m.name)
def test_backward_does_twice_the_forward_matrix_work(name: str, model: ModelArchitecture) -> None:
    """Whatever runs apart: both gradients of a GEMM take as many operations as it did."""
    forward, backward = _lower(model, _options(name, DType.BF16))
    flops = [
        sum(
            node.repeat
            * node.share
            * find_operator("gemm").work_ratio(node.phase)
            * find_operator("gemm").flops(node.dims, 2.0)
            for node in nodes
            if node.operator == "gemm"
        )
        for nodes in (forward, backward)
    ]
    assert 2 * flops[0] == flops[1]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_unfused_attention_is_split_by_heads(degree: int) -> None:
    forward, _ = _lower(_NEOX, _options(has_dropout="true"), tp=degree)
    nodes = _by_role(forward)
    matrices = _NUM_SEQS * _NEOX.num_heads // degree
    square = {"batch": matrices, "m": _LENGTH, "n": _LENGTH, "k": _NEOX.head_dim}
    assert square == nodes["attn_scores"].dims
    assert {"num_matrices": matrices, "length": _LENGTH} == nodes["attn_softmax"].dims
    assert {"num_tokens": matrices * _LENGTH, "hidden": _LENGTH} == nodes["attn_dropout"].dims
    assert {"num_tokens": _TOKENS, "hidden": _NEOX.hidden // degree} == (
        nodes["attn_context_copy"].dims
    )
    assert 0 == nodes["attn_scores"].num_weights


def test_dropout_runs_by_itself_unless_it_is_fused_with_the_residual() -> None:
    apart, _ = _lower(_NEOX, _options(has_dropout="true"))
    fused, _ = _lower(_NEOX, _options(has_dropout="true", fuses_residual="true"))
    names = ["attn_dropout", "attn_out_dropout", "embedding_dropout", "mlp_out_dropout"]
    assert names == sorted(node.role for node in apart if node.operator == "dropout")
    assert ["attn_dropout", "embedding_dropout"] == sorted(
        node.role for node in fused if node.operator == "dropout"
    )


def test_biases_count_as_parameters_wherever_they_are_added() -> None:
    """Fused or not, a layer holds as many."""
    counts = {
        sum(
            int(node.num_weights)
            for node in _lower(_NEOX, _options(fuses_residual=fused, fuses_bias_activation=fused))[
                0
            ]
        )
        for fused in ("true", "false")
    }
    assert 1 == len(counts)


def test_a_gated_mlp_has_no_bias_the_model_does_not_have() -> None:
    forward, _ = _lower(_LLAMA, _options())
    assert not any(node.operator == "bias_add" or node.has_bias for node in forward)


def test_a_chain_of_kernels_is_asked_for_by_its_own_measurements() -> None:
    nodes = _by_role(_lower(_LLAMA, _options())[0])
    assert ["form=eager"] * 2 == [nodes[role].variant for role in ("input_norm", "attn_rope")]
    assert "" == nodes["mlp_activation"].variant


def test_a_fused_bias_has_a_gradient_of_its_own() -> None:
    _, backward = _lower(_NEOX, _options())
    node = _by_role(backward)["attn_qkv_proj_bias_wgrad"]
    assert ("bias_add", Phase.BACKWARD) == (node.operator, node.phase)
    assert {"num_tokens": _TOKENS, "hidden": 3 * _NEOX.hidden} == node.dims


def test_eight_bit_training_converts_the_inputs_of_its_matrix_products() -> None:
    forward, backward = _lower(_LLAMA, _options("plain", DType.FP8))
    products = [node for node in forward if node.operator == "gemm" and node.role != "lm_head"]
    assert {DType.FP8} == {node.dtype for node in products}
    assert {DType.BF16} == {node.written_dtype for node in products}
    assert [f"{node.role}_quantize" for node in products] == [
        node.role for node in forward if node.operator == "quantize"
    ]
    others = [node for node in (*forward, *backward) if node.operator != "gemm"]
    assert {DType.BF16} == {node.dtype for node in others}
    # Weights stay in 16 bit.
    assert all(node.weights_bytes == 2 * node.num_weights for node in products)


def test_gradients_of_8_bit_products_are_converted_as_wide_as_they_are() -> None:
    """What a product reads is converted forward, the gradient of what it wrote backward."""
    forward, backward = (_by_role(nodes) for nodes in _lower(_LLAMA, _options("plain", DType.FP8)))
    for role in ("attn_qkv_proj", "attn_out_proj", "mlp_up_proj", "mlp_down_proj"):
        product, cast = forward[role].dims, forward[f"{role}_quantize"]
        assert {"num_tokens": product["m"], "hidden": product["k"]} == cast.dims
        back = backward[f"{role}_quantize_backward"]
        assert {"num_tokens": product["m"], "hidden": product["n"]} == back.dims
        assert (1.0, Phase.BACKWARD) == (back.share, back.phase)


def test_a_norm_may_write_what_an_8_bit_product_reads() -> None:
    """A byte is read and one written for the transposed copy, of four that a conversion moves."""
    shares = {
        node.role.removesuffix("_quantize"): node.share
        for node in _lower(_LLAMA, _options("megatron-core", DType.FP8))[0]
        if node.operator == "quantize"
    }
    expected = {"attn_qkv_proj": 0.5, "attn_out_proj": 1, "mlp_up_proj": 0.5, "mlp_down_proj": 1}
    assert expected == shares


def test_grouped_queries_have_fewer_keys() -> None:
    nodes = _by_role(_lower(_LLAMA, _options("plain", DType.BF16), tp=4)[0])
    assert (8, 2) == (
        nodes["attention_prefill"].dims["num_heads"],
        nodes["attention_prefill"].dims["num_kv_heads"],
    )
    assert (32 + 2 * 8) * 128 // 4 == nodes["attn_qkv_proj"].dims["n"]


def test_learned_positions_are_added_to_the_embedding() -> None:
    forward, _ = _lower(find_model("gpt2-xl"), _options("megatron-lm-2021"))
    roles = [node.role for node in forward if node.section is Section.EMBEDDING]
    assert ["embedding", "position_embedding", "embedding_sum", "embedding_dropout"] == roles[:4]


def test_logits_are_converted_where_the_framework_does_it() -> None:
    forward, _ = _lower(_NEOX, _options(), tp=4)
    expected = {"num_params": _TOKENS * _NEOX.vocab // 4}
    assert expected == _by_role(forward)["logits_cast"].dims
    without, _ = _lower(_NEOX, _options(casts_logits="false"))
    assert "logits_cast" not in _by_role(without)


def test_rules_of_training_leave_serving_alone() -> None:
    options = dataclasses.replace(_options(), training=None)
    forward, _ = _lower(_NEOX, options)
    assert "attention_prefill" in _layer(forward)
    assert not {"bias_add", "copy"} & {node.operator for node in forward}


def test_a_gate_and_the_input_of_a_norm_may_be_kernels_of_their_own() -> None:
    rules = {"fuses_gate": "false", "casts_norm_inputs": "true"}
    forward, _ = _lower(_LLAMA, _options("plain", DType.BF16, **rules), tp=2)
    nodes = _by_role(forward)
    assert ["silu", "product"] == [nodes[r].operator for r in ("mlp_activation", "mlp_product")]
    assert {"num_tokens": _TOKENS, "intermediate": _LLAMA.intermediate // 2} == (
        nodes["mlp_product"].dims
    )
    roles = _layer(forward)
    for norm in ("input_norm", "post_attention_norm"):
        assert f"{norm}_upcast" == roles[roles.index(norm) - 1]


def test_an_older_attention_kernel_takes_a_multiple_both_ways() -> None:
    for ratio in (1.0, 1.82):
        options = _options("plain", attention_time_ratio=str(ratio))
        shares = [
            node.share
            for nodes in _lower(_LLAMA, options)
            for node in nodes
            if node.operator == "attention_prefill"
        ]
        assert [ratio, ratio] == shares


def test_converted_gradients_are_cast_and_added_up_in_fp32() -> None:
    sums = {}
    for way in ("fused", "separate", "converted"):
        _, backward = _lower(_LLAMA, _options("plain", gradient_accumulation=way))
        sums[way] = {
            node.role: (node.operator, node.dims["num_params"])
            for node in backward
            if node.role in ("mlp_down_proj_accumulate", "mlp_down_proj_cast_accumulate")
        }
    num_params = _LLAMA.hidden * _LLAMA.intermediate
    assert {} == sums["fused"]
    assert {"mlp_down_proj_accumulate": ("gradient_accumulation", num_params)} == sums["separate"]
    assert {
        "mlp_down_proj_cast_accumulate": ("cast", num_params),
        "mlp_down_proj_accumulate": ("gradient_accumulation", 2 * num_params),
    } == sums["converted"]
