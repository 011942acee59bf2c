"""The kernels that end a step, by the rules of a framework."""

import dataclasses

import pytest

from foretoken.domain.frameworks.trainer import TrainerProfile, find_trainer
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.lowering.training_layer import (
    check_kernels,
    reduction_kernels,
    sum_kernels,
    update_kernels,
)
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator

_NEOX = find_trainer("gpt-neox")
_MEGATRON = TrainerProfile(name="test", scales_loss=True)


def test_deepspeed_flattens_checks_unscales_and_updates() -> None:
    reduction = [node.role for node in reduction_kernels(1000, DType.FP16, _NEOX)]
    assert ["gradient_flatten", "gradient_divide", "gradient_spread"] == reduction
    checks = [node.role for node in check_kernels(1000, DType.FP16, _NEOX)]
    assert ["overflow_check_cast", "overflow_check", "gradient_norm_cast", "gradient_norm"] == (
        checks
    )
    update = [node.role for node in update_kernels(1000, DType.FP16, _NEOX)]
    assert ["update_flatten", "gradient_cast", "gradient_unscale", "optimizer_update"] == update


def test_only_half_precision_needs_its_loss_scaled() -> None:
    roles = [[node.role for node in check_kernels(8, dtype, _MEGATRON)] for dtype in _FORMATS]
    assert [["overflow_check", "gradient_norm"], ["gradient_norm"], ["gradient_norm"]] == roles


_FORMATS = (DType.FP16, DType.BF16, DType.FP8)


def test_gradients_in_fp32_are_not_converted() -> None:
    nodes = (*check_kernels(8, DType.BF16, _MEGATRON), *update_kernels(8, DType.BF16, _MEGATRON))
    assert ["gradient_norm", "gradient_unscale", "optimizer_update"] == [n.role for n in nodes]


def test_megatron_divides_clips_and_copies_in_passes_of_their_own() -> None:
    trainer = dataclasses.replace(_MEGATRON, unscales_first=True, copies_parameters=True)
    nodes = update_kernels(8, DType.FP16, trainer)
    expected = ["gradient_clip", "gradient_unscale", "optimizer_update", "parameter_cast"]
    assert expected == [node.role for node in nodes]


def test_transformer_engine_converts_moments_of_16_bit_for_adam_in_fp32() -> None:
    trainer = dataclasses.replace(
        find_trainer("megatron-core"), moment_dtype=DType.BF16, gradient_dtype=DType.BF16
    )
    clipped, *nodes = update_kernels(8, DType.BF16, trainer)
    assert "gradient_unscale" == clipped.role
    # Weights are written by Adam, which keeps the 16 bits that they lack.
    expected = ["moment_upcast", "optimizer_update", "moment_downcast", "moment_store"]
    assert expected == [node.role for node in nodes]
    assert [16, 8, 16, 16] == [node.dims["num_params"] for node in nodes]
    moved = _moved_bytes((nodes[0], *nodes[2:])) / 8
    assert (2 + 4) * 2 + (4 + 2) * 2 + (2 + 2) * 2 == moved
    assert 1.0 == nodes[1].share


def test_transformer_engine_has_whole_masters_of_weights_in_8_bit() -> None:
    trainer = dataclasses.replace(
        find_trainer("megatron-core"), moment_dtype=DType.BF16, gradient_dtype=DType.BF16
    )
    roles = [node.role for node in update_kernels(8, DType.FP8, trainer)]
    assert ("gradient_cast", "parameter_cast") == (roles[0], roles[-1])


def test_an_optimizer_of_16_bit_moments_moves_fewer_bytes() -> None:
    trainer = dataclasses.replace(_MEGATRON, moment_dtype=DType.BF16)
    (update,) = update_kernels(8, DType.BF16, trainer)[-1:]
    assert ("adam", 20 / 28) == (update.operator, update.share)


def test_megatron_core_zeroes_checks_and_scales_all_gradients_of_a_rank() -> None:
    trainer = find_trainer("megatron-core")
    nodes = sum_kernels(8, 2, DType.BF16, trainer)
    # Gradients in fp32 are as many bytes as twice the zeros in 16 bit.
    expected = [("gradient_zero", 16), ("gradient_check", 8), ("gradient_scale", 8)]
    assert expected == [(node.role, node.dims["num_params"]) for node in nodes]


def test_a_single_rank_scales_nothing() -> None:
    nodes = sum_kernels(8, 1, DType.BF16, find_trainer("megatron-core"))
    assert ["gradient_zero", "gradient_check"] == [node.role for node in nodes]


def test_a_rank_without_parameters_runs_nothing() -> None:
    for kernels in (reduction_kernels, check_kernels, update_kernels):
        assert () == kernels(0, DType.FP16, _NEOX)


def test_what_a_framework_leaves_out_does_not_run() -> None:
    bare = dataclasses.replace(_MEGATRON, clips_gradients=False, scales_loss=False)
    assert () == check_kernels(8, DType.FP16, bare)
    assert ["optimizer_update"] == [node.role for node in update_kernels(8, DType.FP16, bare)]
    assert () == reduction_kernels(8, DType.FP16, bare)


@pytest.mark.parametrize("dtype", _FORMATS)
def test_values_are_stored_in_sixteen_bit(dtype: DType) -> None:
    nodes = (*reduction_kernels(8, dtype, _NEOX), *update_kernels(8, dtype, _NEOX))
    assert {dtype if dtype is not DType.FP8 else DType.BF16} == {node.dtype for node in nodes}
    assert {Section.GRADIENT, Section.OPTIMIZER} == {node.section for node in nodes}
    assert all({"num_params": 8} == node.dims for node in nodes)


def test_an_optimizer_of_single_operations_moves_its_states_kernel_by_kernel() -> None:
    fused, apart = (
        update_kernels(1000, DType.BF16, dataclasses.replace(_MEGATRON, fuses_optimizer=is_fused))
        for is_fused in (True, False)
    )
    assert "adam" == fused[-1].operator
    assert ["unscale", "cast"] == [node.operator for node in apart[-2:]]
    assert _moved_bytes(apart) > 2 * _moved_bytes(fused)


def _moved_bytes(nodes: tuple[OperatorNode, ...]) -> float:
    return sum(
        float(find_operator(node.operator).moved_bytes(node.dims, node.dtype.num_bytes))
        for node in nodes
    )
