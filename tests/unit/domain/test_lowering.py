"""What a model, a batch and a layout become: the operators of one rank."""

import dataclasses

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import (
    BatchShape,
    DecodeShape,
    OperatorNode,
    PrefillShape,
    RankContext,
)
from foretoken.domain.lowering.lower import (
    check_layout,
    lower_backward,
    lower_forward,
    lower_rank,
)
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout

_TRAINING = LoweringOptions(dtype=DType.BF16, has_loss=True)
_SERVING = LoweringOptions(dtype=DType.BF16, has_kv_cache=True, has_sampler=True)
_LLAMA = find_model("llama-2-7b")
_BATCH = BatchShape(
    num_tokens=4096, num_output_rows=4096, prefill=PrefillShape(**prefill_dims(1, 4096, 0))
)


def _rank(model: ModelArchitecture = _LLAMA, stage: int = 0, **degrees: int) -> RankContext:
    return RankContext(
        model=model, layout=ParallelLayout(**degrees), devices_per_node=8, stage=stage
    )


def _by_role(nodes: tuple[OperatorNode, ...]) -> dict[str, OperatorNode]:
    by_role = {node.role: node for node in nodes}
    assert len(by_role) == len(nodes)
    return by_role


def test_a_dense_layer_runs_its_operators_in_order() -> None:
    nodes = lower_forward(_LLAMA, _BATCH, _TRAINING)
    expected = [
        "embedding",
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
        "final_norm",
        "lm_head",
        "loss",
    ]
    assert expected == [node.role for node in nodes]


def test_every_lowered_operator_has_legal_dimensions() -> None:
    """Forward and backward of all dense presets, cut both ways."""
    for name in ("llama-3-8b", "gpt2-xl", "phi-2", "gpt-neox-20b", "qwen3-8b", "tiny-llama"):
        rank = _rank(find_model(name), tp=1, pp=2)
        forward = lower_rank(_BATCH, _TRAINING, rank)
        for node in (*forward, *lower_backward(forward)):
            find_operator(node.operator).check_dims(node.dims)
            assert all(isinstance(value, int) for value in node.dims.values()), node


def test_a_mixed_batch_has_both_attentions() -> None:
    shape = BatchShape(
        num_tokens=130,
        num_output_rows=3,
        prefill=PrefillShape(**prefill_dims(1, 128, 0)),
        decode=DecodeShape(num_seqs=2, kv_tokens=600, kv_tokens_max=400),
    )
    nodes = _by_role(lower_forward(_LLAMA, shape, _SERVING))
    assert (130, 3) == (nodes["attn_qkv_proj"].dims["m"], nodes["lm_head"].dims["m"])
    assert 600 == nodes["attention_decode"].dims["kv_tokens"]
    assert 128 == nodes["attention_prefill"].dims["q_tokens"]
    assert {"num_seqs": 3, "vocab": 32000} == nodes["sampler"].dims


def test_a_fused_norm_takes_the_residual_with_it() -> None:
    options = dataclasses.replace(_SERVING, fuses_add_norm=True)
    roles = {n.role: n.operator for n in lower_forward(_LLAMA, _BATCH, options)}
    assert "add_rms_norm" == roles["input_norm"]
    assert not {"attn_residual", "mlp_residual"} & set(roles)


def test_tensor_parallelism_halves_weights_and_sums_row_split_outputs() -> None:
    nodes = _by_role(lower_rank(_BATCH, _TRAINING, _rank(tp=2)))
    assert {"m": 4096, "n": 11008, "k": 4096} == nodes["mlp_up_proj"].dims
    assert {"m": 4096, "n": 4096, "k": 5504} == nodes["mlp_down_proj"].dims
    assert 16 == nodes["attention_prefill"].dims["num_heads"]
    reduction = nodes["mlp_down_proj_all_reduce"]
    expected = {"message_bytes": 4096 * 4096 * 2, "devices_per_node": 2, "num_nodes": 1}
    assert (expected, 32) == (reduction.dims, reduction.repeat)


def test_key_heads_are_repeated_where_there_are_fewer_than_ranks() -> None:
    nodes = _by_role(lower_rank(_BATCH, _TRAINING, _rank(find_model("llama-3-70b"), tp=16)))
    assert (4 + 2) * 128 == nodes["attn_qkv_proj"].dims["n"]
    assert (4, 1) == (
        nodes["attention_prefill"].dims["num_heads"],
        nodes["attention_prefill"].dims["num_kv_heads"],
    )


def test_ranks_sum_the_squares_that_a_norm_over_all_heads_divides_by() -> None:
    """Once for queries and keys, in fp32; a norm of each head alone needs no other rank."""
    minimax, qwen = (find_model(name) for name in ("minimax-m2.5", "qwen3-32b"))
    nodes = _by_role(lower_rank(_BATCH, _SERVING, _rank(minimax, tp=2)))
    reduction = nodes["q_norm_of_all_all_reduce"]
    expected = {"message_bytes": 4096 * 2 * 4, "devices_per_node": 2, "num_nodes": 1}
    assert (expected, 62) == (reduction.dims, reduction.repeat)
    alone = lower_rank(_BATCH, _SERVING, _rank(minimax))
    by_head = lower_rank(_BATCH, _SERVING, _rank(qwen, tp=2))
    assert not [node for node in (*alone, *by_head) if "norm_of_all_all_reduce" in node.role]


def test_engines_multiply_some_routers_in_fp32() -> None:
    formats = [
        {node.dtype for node in nodes if node.role == "moe_router"}
        for name in ("minimax-m2.5", "step-3.7-flash", "qwen3-30b-a3b")
        for nodes in [lower_rank(_BATCH, _SERVING, _rank(find_model(name)))]
    ]
    assert [{DType.FP32}, {DType.FP32}, {DType.BF16}] == formats


def test_logits_are_gathered_for_sampling_and_stay_split_for_a_loss() -> None:
    serving = _by_role(lower_rank(_BATCH, _SERVING, _rank(tp=2)))
    assert 4096 * 32000 * 2 == serving["lm_head_all_gather"].dims["message_bytes"]
    training = _by_role(lower_rank(_BATCH, _TRAINING, _rank(tp=2)))
    assert "lm_head_all_gather" not in training
    assert 16000 == training["loss"].dims["vocab"]
    assert 4096 * 4 == training["loss_all_reduce"].dims["message_bytes"]


def test_the_input_gradients_of_column_split_gemms_are_summed() -> None:
    forward = lower_rank(_BATCH, _TRAINING, _rank(tp=2))
    backward = [n for n in lower_backward(forward) if n.operator == "all_reduce"]
    assert [
        "lm_head_dgrad_all_reduce",
        "mlp_up_proj_dgrad_all_reduce",
        "attn_qkv_proj_dgrad_all_reduce",
    ] == [node.role for node in backward]
    assert [1, 32, 32] == [node.repeat for node in backward]
    assert {4096 * 4096 * 2} == {node.dims["message_bytes"] for node in backward}


def test_backward_runs_in_reverse_with_two_halves_for_a_gemm() -> None:
    """Both gradients are one backward call of the forward GEMM's sizes, as it is measured."""
    forward = lower_forward(_LLAMA, _BATCH, _TRAINING)
    backward = lower_backward(forward)
    assert "loss_backward" == backward[0].role
    # Only products add to the sum of gradients themselves.
    last = ["embedding_backward", "embedding_accumulate"]
    assert last == [node.role for node in backward[-2:]]
    nodes = _by_role(backward)
    halves = [nodes["mlp_up_proj_dgrad"], nodes["mlp_up_proj_wgrad"]]
    assert [{"m": 4096, "n": 22016, "k": 4096}] * 2 == [half.dims for half in halves]
    assert [0.5, 0.5] == [half.share for half in halves]
    assert [Phase.BACKWARD] * 2 == [half.phase for half in halves]
    assert Phase.BACKWARD is nodes["attention_prefill_backward"].phase


def test_an_operator_that_cannot_be_trained_is_refused() -> None:
    forward = lower_forward(find_model("mixtral-8x7b"), _BATCH, _TRAINING)
    with pytest.raises(InvalidRequestError, match="moe_experts cannot be trained yet"):
        lower_backward(forward)


def test_stages_send_to_the_next_and_the_last_sends_nothing() -> None:
    ranks = [_rank(pp=3, stage=stage) for stage in range(3)]
    roles = [[n.role for n in lower_rank(_BATCH, _TRAINING, rank)] for rank in ranks]
    assert [True, True, False] == ["stage_send" in r for r in roles]
    assert [True, False, False] == ["embedding" in r for r in roles]
    assert [False, False, True] == ["lm_head" in r for r in roles]
    assert [range(11), range(11, 22), range(22, 32)] == [rank.stage_layers for rank in ranks]


def test_expert_layers_follow_the_dense_ones_onto_stages() -> None:
    """Three dense layers first: only the first stage of DeepSeek's proportions has any."""
    model = dataclasses.replace(find_model("deepseek-v3"), mla=None, num_layers=8)
    repeats = [
        {n.role: n.repeat for n in lower_rank(_BATCH, _SERVING, _rank(model, stage, pp=2))}
        for stage in range(2)
    ]
    assert (3, 1) == (repeats[0]["mlp_down_proj"], repeats[0]["moe_experts"])
    assert "mlp_down_proj" not in repeats[1]
    assert 4 == repeats[1]["moe_experts"]


def test_a_tied_head_shares_its_weights_until_it_is_on_another_stage() -> None:
    model = find_model("qwen2-0.5b")
    assert model.has_tied_embedding
    whole = _by_role(lower_rank(_BATCH, _SERVING, _rank(model)))
    assert 0 == whole["lm_head"].num_weights
    last = _by_role(lower_rank(_BATCH, _SERVING, _rank(model, stage=1, pp=2)))
    assert model.vocab * model.hidden == last["lm_head"].num_weights


def test_a_layout_that_does_not_fit_says_why() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_layout(_rank(tp=3, pp=64, cp=2))
    fields = {violation.field for violation in caught.value.violations}
    assert {"layout.tp", "layout.pp", "layout.cp"} == fields


def test_a_form_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="mla_form: must be one of module, operators"):
        dataclasses.replace(_SERVING, mla_form="kernel")
