"""Operators: work formulas against hand-made sums, dimensions, sweeps, columns."""

import math

import numpy as np
import pytest
from operator_work import (
    LATENT,
    LATENT_TOKEN_WEIGHTS,
    LATENT_UNPACKING_WEIGHTS,
    PREFILL,
    SPARSE_AND_LINEAR_WORK,
    OperatorWork,
)

from foretoken.domain.errors import InvalidRequestError, UnknownOperatorError
from foretoken.domain.measurements.estimate import Phase
from foretoken.domain.operators.spec.operator import all_operators, find_operator

_NUM_SMS = 108
_HALF = 2.0


_ROWS = {"num_tokens": 4, "hidden": 8}
_MLP = {"num_tokens": 4, "intermediate": 8}
_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
_GROUP = {"message_bytes": 1000, "devices_per_node": 4, "num_nodes": 2}

_WORK = {
    "gemm": OperatorWork(
        dims={"m": 2, "n": 3, "k": 5}, flops=60, moved_bytes=62, num_weights=15, saved_elements=10
    ),
    "batched_gemm": OperatorWork(
        dims={"batch": 4, "m": 2, "n": 3, "k": 5},
        flops=240,
        moved_bytes=4 * 62,
        saved_elements=4 * (10 + 15),
    ),
    # One query sees one key, the next two, the last three.
    "causal_softmax": OperatorWork(
        dims={"num_matrices": 2, "length": 3},
        flops=2 * 6 * 6,
        moved_bytes=2 * (6 + 9) * 2,
        saved_elements=18,
    ),
    "softmax": OperatorWork(
        dims={"num_rows": 4, "width": 8}, flops=160, moved_bytes=2 * 64, saved_elements=32
    ),
    "masked_fill": OperatorWork(
        dims={"num_matrices": 4, "q_len": 2, "kv_len": 3}, flops=24, moved_bytes=2 * 48 + 6
    ),
    "fused_adam": OperatorWork(
        dims={"num_params": 100, "num_tensors": 3}, flops=1200, moved_bytes=7 * 200
    ),
    "embedding": OperatorWork(
        # A row read and written, and an 8-byte token id.
        dims={**_ROWS, "vocab": 100},
        moved_bytes=4 * (16 + 16 + 8),
        num_weights=800,
    ),
    "rms_norm": OperatorWork(
        dims=_ROWS, flops=128, moved_bytes=64 + 64 + 16, num_weights=8, saved_elements=32
    ),
    "layer_norm": OperatorWork(
        dims=_ROWS, flops=224, moved_bytes=64 + 64 + 32, num_weights=16, saved_elements=32
    ),
    "add_rms_norm": OperatorWork(
        dims=_ROWS, flops=160, moved_bytes=4 * 64 + 16, num_weights=8, saved_elements=32
    ),
    "residual_add": OperatorWork(dims=_ROWS, flops=32, moved_bytes=3 * 64),
    "silu_mul": OperatorWork(dims=_MLP, flops=160, moved_bytes=3 * 64, saved_elements=64),
    "silu": OperatorWork(dims=_MLP, flops=128, moved_bytes=2 * 64, saved_elements=32),
    "gelu": OperatorWork(dims=_MLP, flops=256, moved_bytes=2 * 64, saved_elements=32),
    "rope": OperatorWork(
        dims={"num_tokens": 4, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8},
        flops=6 * 256,
        moved_bytes=2 * 512,
    ),
    "kv_cache_write": OperatorWork(
        dims={"num_tokens": 4, "num_kv_heads": 2, "head_dim": 8}, moved_bytes=2 * 256 + 4 * 8
    ),
    "attention_prefill": OperatorWork(
        dims={**PREFILL, **_HEADS},
        flops=2 * 2 * 21 * 4 * 8,
        # Queries and output: 3 tokens of 4 heads; keys and values: 8 tokens of 2 heads.
        moved_bytes=(2 * 3 * 4 + 2 * 8 * 2) * 8 * 2,
        saved_elements=(3 * 4 + 2 * 8 * 2) * 8,
    ),
    "attention_decode": OperatorWork(
        dims={"num_seqs": 2, "kv_tokens": 10, "kv_tokens_max": 7, **_HEADS},
        flops=2 * 2 * 10 * 4 * 8,
        moved_bytes=(2 * 2 * 4 + 2 * 10 * 2) * 8 * 2,
    ),
    "attention_mixed": OperatorWork(
        dims={
            **PREFILL,
            "num_decode_seqs": 2,
            "decode_kv_tokens": 10,
            "decode_kv_tokens_max": 7,
            **_HEADS,
        },
        flops=2688 + 1280,
        moved_bytes=896 + 896,
    ),
    "moe_experts": OperatorWork(
        dims={
            "num_tokens": 4,
            "top_k": 2,
            "num_experts": 8,
            "num_active_experts": 5,
            "hidden": 16,
            "intermediate": 8,
        },
        # Eight rows through three 16 x 8 matrices; the weights of five experts are read.
        flops=2 * 8 * 384,
        moved_bytes=(5 * 384 + 8 * (2 * 16 + 3 * 8)) * 2,
        num_weights=8 * 384,
        saved_elements=8 * (16 + 3 * 8),
    ),
    "attention_prefill_window": OperatorWork(
        # Five tokens that see three at most: 1 + 2 + 3 + 3 + 3 pairs.
        dims={
            "num_seqs": 1,
            "q_tokens": 5,
            "kv_tokens": 5,
            "score_pairs": 12,
            "window": 3,
            **_HEADS,
        },
        flops=1536,
        moved_bytes=640 + 320,
        saved_elements=(5 * 4 + 2 * 5 * 2) * 8,
    ),
    "attention_decode_window": OperatorWork(
        # Contexts of eight and four tokens, of which three each are in the window.
        dims={
            "num_seqs": 2,
            "kv_tokens": 12,
            "kv_tokens_max": 8,
            "visible_tokens": 6,
            "window": 3,
            **_HEADS,
        },
        flops=768,
        moved_bytes=256 + 384,
    ),
    "mla_prefill": OperatorWork(
        # Keys of 8 + 2 features, of which all heads share the 2, and values of 8.
        dims={
            **PREFILL,
            "num_heads": 4,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 2,
            "v_head_dim": 8,
        },
        flops=2 * 21 * 4 * 18,
        moved_bytes=(3 * 4 * 18 + 8 * (4 * 16 + 2)) * 2,
        saved_elements=4 * (3 * 10 + 8 * 18),
    ),
    "mla_decode": OperatorWork(
        # Scores over 16 + 2 features of the latent vector, sums over 16 of them.
        dims={
            "num_seqs": 2,
            "kv_tokens": 10,
            "kv_tokens_max": 6,
            "num_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 2,
        },
        flops=2 * 10 * 4 * 34,
        moved_bytes=(2 * 4 * 34 + 10 * 18) * 2,
    ),
    "mla_prefill_module": OperatorWork(
        dims={**PREFILL, **LATENT},
        flops=2 * (21 * 4 * 18 + 3 * LATENT_TOKEN_WEIGHTS + 8 * LATENT_UNPACKING_WEIGHTS),
        moved_bytes=(3200 + 8 * 18 + 2 * 3 * 32) * 2,
        num_weights=3200,
    ),
    "mla_decode_module": OperatorWork(
        dims={"num_seqs": 2, "kv_tokens": 10, "kv_tokens_max": 6, **LATENT},
        flops=2 * (10 * 4 * 34 + 2 * 3200),
        moved_bytes=(3200 + 10 * 18 + 2 * 2 * 32) * 2,
        num_weights=3200,
    ),
    "moe_local_experts": OperatorWork(
        # Of the eight pairs five meet experts of this rank, three of its four.
        dims={
            "num_tokens": 4,
            "top_k": 2,
            "num_experts": 8,
            "num_local_experts": 4,
            "num_local_pairs": 5,
            "num_active_experts": 3,
            "hidden": 16,
            "intermediate": 8,
        },
        flops=2 * 5 * 384,
        moved_bytes=(3 * 384 + 5 * (2 * 16 + 3 * 8)) * 2,
        num_weights=4 * 384,
    ),
    # Ten rows over three experts of 4 x 8 features.
    "grouped_gemm": OperatorWork(
        dims={"num_groups": 3, "m": 10, "n": 8, "k": 4},
        flops=2 * 10 * 32,
        moved_bytes=(10 * (4 + 8) + 3 * 32) * 2,
        num_weights=3 * 32,
        saved_elements=40,
    ),
    # Gradients are added up in fp32.
    "grouped_gemm_wgrad": OperatorWork(
        dims={"num_groups": 3, "m": 10, "n": 8, "k": 4},
        flops=2 * 10 * 32,
        moved_bytes=10 * (4 + 8) * 2 + 3 * 32 * 8,
    ),
    # Four tokens are read, eight copies written, and a place of four bytes for each.
    "moe_permute": OperatorWork(
        dims={"num_tokens": 4, "top_k": 2, "hidden": 8}, moved_bytes=(4 + 8) * 8 * 2 + 8 * 4
    ),
    "moe_unpermute": OperatorWork(
        dims={"num_tokens": 4, "top_k": 2, "hidden": 8},
        flops=64,
        moved_bytes=(4 + 8) * 8 * 2 + 8 * 4,
    ),
    "sampler": OperatorWork(dims={"num_seqs": 4, "vocab": 100}, flops=2000, moved_bytes=3 * 800),
    "cross_entropy": OperatorWork(
        dims={"num_tokens": 4, "vocab": 100}, flops=2000, moved_bytes=2 * 800, saved_elements=800
    ),
    "adam": OperatorWork(dims={"num_params": 100}, flops=1200, moved_bytes=100 * (6 * 4 + 2 * 2)),
    "bias_add": OperatorWork(dims=_ROWS, flops=32, moved_bytes=(2 * 32 + 8) * 2, num_weights=8),
    "product": OperatorWork(dims=_MLP, flops=32, moved_bytes=3 * 64, saved_elements=64),
    "norm_upcast": OperatorWork(dims=_ROWS, moved_bytes=4 * 64, saved_elements=64),
    "copy": OperatorWork(dims=_ROWS, moved_bytes=2 * 64),
    "quantize": OperatorWork(dims=_ROWS, flops=64, moved_bytes=2 * 64),
    "dropout": OperatorWork(dims=_ROWS, flops=64, moved_bytes=2 * 64 + 32, saved_elements=16),
    "gradient_accumulation": OperatorWork(dims={"num_params": 100}, flops=100, moved_bytes=600),
    "buffer_copy": OperatorWork(dims={"num_params": 100}, moved_bytes=400),
    "cast": OperatorWork(dims={"num_params": 100}, moved_bytes=100 * (2 + 4)),
    # A block has eight values, each of two bytes, on the device's side.
    "kv_swap": OperatorWork(dims={"num_blocks": 3, "block_elements": 8}, moved_bytes=3 * 8 * 2),
    # Logits of four tokens, and a weight and a number of 4 bytes for each of two experts.
    "moe_topk": OperatorWork(
        dims={"num_tokens": 4, "num_experts": 8, "top_k": 2},
        flops=160,
        moved_bytes=64 + 4 * 2 * 8,
        saved_elements=64,
    ),
    "fill": OperatorWork(dims={"num_params": 100}, moved_bytes=200),
    "gradient_norm": OperatorWork(dims={"num_params": 100}, flops=200, moved_bytes=400),
    "unscale": OperatorWork(dims={"num_params": 100}, flops=100, moved_bytes=800),
    "launch_gap": OperatorWork(dims={"num_kernels": 4}, moved_bytes=32),
    # Two of three matrices of 3 x 5 are read, and two rows of 5 and of 3.
    "lora_gemm": OperatorWork(
        dims={"num_slots": 3, "num_active": 2, "m": 2, "n": 3, "k": 5},
        flops=60,
        moved_bytes=2 * (16 + 30),
        num_weights=45,
    ),
    "host_step": OperatorWork(dims={"num_seqs": 4, "num_ranks": 2}, moved_bytes=4 * 8),
    "all_reduce": OperatorWork(dims=_GROUP, moved_bytes=2 * 1000 * 7 / 8),
    "all_gather": OperatorWork(dims=_GROUP, moved_bytes=1000 * 7 / 8),
    "reduce_scatter": OperatorWork(dims=_GROUP, moved_bytes=1000 * 7 / 8),
    "all_to_all": OperatorWork(dims=_GROUP, moved_bytes=1000 * 7 / 8),
    "broadcast": OperatorWork(dims=_GROUP, moved_bytes=1000),
    "send_recv": OperatorWork(dims={**_GROUP, "devices_per_node": 1}, moved_bytes=1000),
    **SPARSE_AND_LINEAR_WORK,
}

_OPERATORS = sorted(all_operators())
# What is only imported has no sweep to check.
_IMPORTED = {"host_step", "launch_gap", "lora_gemm"}
_SWEPT = sorted(set(_OPERATORS) - _IMPORTED)


@pytest.mark.parametrize("name", _OPERATORS)
def test_work_is_what_the_sum_by_hand_says(name: str) -> None:
    spec, expected = find_operator(name), _WORK[name]
    found = OperatorWork(
        dims=expected.dims,
        flops=spec.flops(expected.dims, _HALF),
        moved_bytes=spec.moved_bytes(expected.dims, _HALF),
        num_weights=spec.num_weights(expected.dims),
        saved_elements=spec.saved_elements(expected.dims),
    )
    assert expected == found


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", _SWEPT)
def test_every_sweep_point_is_a_legal_call(name: str, quick: bool) -> None:
    spec = find_operator(name)
    points = list(spec.sweep(quick))
    assert points
    for point in points:
        spec.check_dims(point)


@pytest.mark.parametrize("name", _SWEPT)
def test_a_quick_sweep_is_the_smaller_one(name: str) -> None:
    spec = find_operator(name)
    assert len(list(spec.sweep(True))) < len(list(spec.sweep(False)))


@pytest.mark.parametrize("name", _OPERATORS)
def test_formulas_give_the_same_for_columns_and_for_numbers(name: str) -> None:
    spec = find_operator(name)
    points = list(spec.sweep(True))
    columns = {dim: np.array([point[dim] for point in points]) for dim in spec.dim_names}
    formulas = {
        "flops": lambda d: spec.flops(d, _HALF),
        "moved_bytes": lambda d: spec.moved_bytes(d, _HALF),
        "num_weights": spec.num_weights,
        "saved_elements": spec.saved_elements,
        **{
            feature: lambda d, formula=formula: formula(d, _NUM_SMS)
            for feature, formula in spec.features.items()
        },
    }
    for what, formula in formulas.items():
        one_by_one = [float(formula(point)) for point in points]
        at_once = np.broadcast_to(formula(columns), len(points)).astype(float).tolist()
        assert (what, one_by_one) == (what, at_once)


@pytest.mark.parametrize("name", _OPERATORS)
def test_features_are_finite_numbers_over_the_whole_sweep(name: str) -> None:
    spec = find_operator(name)
    for point in spec.sweep(False):
        assert all(math.isfinite(formula(point, _NUM_SMS)) for formula in spec.features.values())


@pytest.mark.parametrize("name", _OPERATORS)
def test_only_collectives_have_no_flops_and_ranks(name: str) -> None:
    spec = find_operator(name)
    assert spec.is_collective == (
        ("message_bytes", "devices_per_node", "num_nodes") == spec.dim_names
    )
    if spec.is_collective:
        assert 0 == spec.flops(_GROUP, _HALF)


def test_a_collective_of_one_rank_moves_nothing() -> None:
    alone = {"message_bytes": 1000, "devices_per_node": 1, "num_nodes": 1}
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert 0 == find_operator(name).moved_bytes(alone, 1.0)


def test_an_element_of_half_the_size_moves_half_the_weights() -> None:
    spec, dims = find_operator("gemm"), {"m": 2, "n": 3, "k": 5}
    assert 31 == spec.moved_bytes(dims, 1.0)
    assert 15.5 == spec.moved_bytes(dims, 0.5)


def test_the_backward_pass_has_its_own_share_of_work() -> None:
    spec = find_operator("attention_prefill")
    assert (1.0, 2.5) == (spec.work_ratio(Phase.FORWARD), spec.work_ratio(Phase.BACKWARD))


def test_dims_must_be_named_exactly_and_large_enough() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        find_operator("gemm").check_dims({"m": 0, "n": 3, "batch": 2})
    expected = {"m": "must be at least 1", "k": "missing (input features, the reduced dimension)"}
    found = {v.field: v.description for v in caught.value.violations}
    assert expected == {name: found[name] for name in expected}
    assert {"m", "k", "batch"} == set(found)


def test_an_unknown_operator_suggests_the_nearest() -> None:
    with pytest.raises(UnknownOperatorError, match="did you mean gemm"):
        find_operator("gem")


@pytest.mark.parametrize("name", sorted(all_operators()))
def test_no_swept_point_contradicts_itself(name: str) -> None:
    """What an operator is swept over can be, quick or not."""
    spec = find_operator(name)
    for quick in (True, False):
        for dims in spec.sweep(quick):
            assert spec.find_contradictions(dims) == []


_DECODE = {"num_seqs": 4, "kv_tokens": 400, "kv_tokens_max": 100, "head_dim": 64}


@pytest.mark.parametrize(
    ("operator", "dims", "problem"),
    [
        (
            "attention_decode",
            {**_DECODE, "num_heads": 8, "num_kv_heads": 32},
            "num_kv_heads: 32 is more than the 8 of num_heads",
        ),
        (
            "attention_decode",
            {**_DECODE, "num_heads": 8, "num_kv_heads": 3},
            "num_kv_heads: 3 must divide the 8 of num_heads",
        ),
        (
            "attention_decode",
            {**_DECODE, "kv_tokens_max": 500, "num_heads": 8, "num_kv_heads": 8},
            "kv_tokens: 400 is less than 503, kv_tokens_max and a token of every other sequence",
        ),
        (
            "moe_topk",
            {"num_tokens": 4, "num_experts": 8, "top_k": 9},
            "top_k: 9 is more than the 8 of num_experts",
        ),
        (
            "moe_experts",
            {
                "num_tokens": 4,
                "top_k": 9,
                "num_experts": 8,
                "num_active_experts": 8,
                "hidden": 64,
                "intermediate": 32,
            },
            "top_k: 9 is more than the 8 of num_experts",
        ),
    ],
)
def test_dimensions_that_contradict_each_other_are_refused(
    operator: str, dims: dict[str, int], problem: str
) -> None:
    """One call and a column with one such row alike."""
    spec = find_operator(operator)
    with pytest.raises(InvalidRequestError, match=problem):
        spec.check_call(dims)
    columns = {name: np.array([value, value]) for name, value in dims.items()}
    violation, *_ = spec.find_contradictions(columns)
    assert problem == f"{violation.field}: {violation.description}"
