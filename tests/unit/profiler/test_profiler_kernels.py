"""Every kernel computes what its operator says, on random inputs, in both phases."""

from collections.abc import Mapping
from functools import cache

import pytest
import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.kernel import (
    TORCH_DTYPES,
    Kernel,
    TensorFactory,
    all_kernels,
    find_kernels,
    prepare_case,
)

SPEC = TimerSpec(max_input_sets=3)
CPU = torch.device("cpu")


def _cases() -> list[tuple[Kernel, Phase, DType]]:
    return [
        (kernel, phase, dtype)
        for name in all_kernels()
        for phase in Phase
        for dtype in (DType.FP32, DType.BF16)
        for kernel in find_kernels(name, dtype, phase, CPU)
    ]


def _name(value: object) -> str:
    if isinstance(value, Kernel):
        return f"{value.operator}-{value.source}-{value.variant}"
    return getattr(value, "name", str(value)).lower()


@cache
def tensors(dtype: torch.dtype = torch.float32) -> TensorFactory:
    return TensorFactory(torch.device("cpu"), dtype, seed=1)


def smallest_point(operator: str) -> Mapping[str, int]:
    spec = find_operator(operator)
    return min(spec.sweep(True), key=lambda dims: float(spec.moved_bytes(dims, 4.0)))


def call_of(operator: str, phase: Phase, dtype: DType) -> OperatorCall:
    return OperatorCall(operator=operator, dtype=dtype, phase=phase, dims=smallest_point(operator))


@pytest.mark.parametrize(("kernel", "phase", "dtype"), _cases(), ids=_name)
def test_kernel_runs_with_every_input_set(kernel: Kernel, phase: Phase, dtype: DType) -> None:
    case = prepare_case(
        kernel,
        call_of(kernel.operator, phase, dtype),
        tensors(TORCH_DTYPES[dtype]),
        SPEC,
        cache_bytes=1e5,
    )
    assert case.input_bytes > 0
    for index in range(2 * case.num_input_sets):
        case.call(index)


@pytest.mark.parametrize("operator", sorted(all_kernels()))
def test_inputs_are_random_and_of_the_dtype(operator: str) -> None:
    """But for what counts or pads: steps of an optimizer, room after a ragged batch."""
    for kernel in find_kernels(operator, DType.BF16, Phase.FORWARD, CPU):
        inputs = kernel.make_inputs(smallest_point(operator), tensors(torch.bfloat16))
        values = [tensor for tensor in inputs if tensor.is_floating_point() and tensor.numel() > 1]
        drawn = [tensor for tensor in values if tensor.float().std() > 0]
        assert any(tensor.dtype is torch.bfloat16 for tensor in drawn)
        for tensor in drawn:
            assert tensor.float().std() > 0.5


def test_every_operator_has_a_kernel_for_the_cpu() -> None:
    for operator in all_kernels():
        assert find_kernels(operator, DType.FP32, Phase.FORWARD, CPU)


def test_gemm_multiplies_by_the_transposed_weight() -> None:
    kernel, dims = all_kernels()["gemm"], {"m": 3, "n": 5, "k": 7}
    activation, weight = kernel.make_inputs(dims, tensors())
    expected = activation @ weight.T
    torch.testing.assert_close(kernel.bind(dims)(activation, weight), expected)


def test_adam_moves_the_master_weights_and_their_copy() -> None:
    kernel = all_kernels()["adam"]
    inputs = kernel.make_inputs({"num_params": 64}, tensors(torch.bfloat16))
    before = inputs[2].clone()
    kernel.bind({"num_params": 64})(*inputs)
    assert not torch.equal(inputs[2], before)
    torch.testing.assert_close(inputs[0], inputs[2].to(torch.bfloat16))


def test_small_inputs_rotate_over_the_cache_and_large_ones_need_not() -> None:
    kernel = all_kernels()["residual_add"]

    def num_sets(cache_bytes: float) -> int:
        call = OperatorCall(
            operator="residual_add", dtype=DType.FP32, dims={"num_tokens": 8, "hidden": 64}
        )
        return prepare_case(
            kernel, call, tensors(), TimerSpec(max_input_sets=5), cache_bytes
        ).num_input_sets

    assert (num_sets(1e3), num_sets(4096 * 0.75), num_sets(1e6)) == (1, 3, 5)


def test_backward_of_a_residual_adds_the_gradients_of_both_branches() -> None:
    kernel, dims = all_kernels()["residual_add"], {"num_tokens": 2, "hidden": 3}
    assert kernel.bind_backward is not None
    x = torch.randn(2, 3, requires_grad=True)
    outputs = kernel.bind_backward(dims)(x, torch.randn(2, 3))
    left, right = torch.randn(2, 3), torch.randn(2, 3)
    (gradient,) = torch.autograd.grad(outputs, x, (left, right))
    torch.testing.assert_close(gradient, left + right)


def test_backward_without_gradients_is_refused() -> None:
    call = call_of("sampler", Phase.BACKWARD, DType.FP32)
    with pytest.raises(InvalidRequestError, match="no backward"):
        prepare_case(all_kernels()["sampler"], call, tensors(), SPEC, cache_bytes=1.0)
