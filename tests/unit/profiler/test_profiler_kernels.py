"""Every kernel computes what its operator says, on random inputs, in both phases."""

from collections.abc import Mapping

import pytest
import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import DType, OperatorCall, Phase
from foretoken.domain.operator import find_operator
from foretoken.profiler.attention import attend, attention_inputs
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.kernel import TensorFactory, all_kernels, prepare_case

SPEC = TimerSpec(max_input_sets=3)
CASES = [
    (name, phase)
    for name, kernel in all_kernels().items()
    for phase in Phase
    if phase is Phase.FORWARD or kernel.differentiable
]


def tensors(dtype: torch.dtype = torch.float32) -> TensorFactory:
    return TensorFactory(torch.device("cpu"), dtype, seed=1)


def smallest_point(operator: str) -> Mapping[str, int]:
    spec = find_operator(operator)
    return min(spec.sweep(True), key=lambda dims: float(spec.moved_bytes(dims, 4.0)))


def call_of(operator: str, phase: Phase, dtype: DType) -> OperatorCall:
    return OperatorCall(operator=operator, dtype=dtype, phase=phase, dims=smallest_point(operator))


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize(("operator", "phase"), CASES)
def test_kernel_runs_with_every_input_set(operator: str, phase: Phase, dtype: DType) -> None:
    torch_dtype = torch.float32 if dtype is DType.FP32 else torch.bfloat16
    case = prepare_case(
        all_kernels()[operator],
        call_of(operator, phase, dtype),
        tensors(torch_dtype),
        SPEC,
        cache_bytes=1e5,
    )
    assert case.input_bytes > 0
    for index in range(2 * case.num_input_sets):
        case.call(index)


@pytest.mark.parametrize("operator", sorted(all_kernels()))
def test_inputs_are_random_and_of_the_dtype(operator: str) -> None:
    inputs = all_kernels()[operator].make_inputs(smallest_point(operator), tensors(torch.bfloat16))
    values = [tensor for tensor in inputs if tensor.is_floating_point() and tensor.numel() > 1]
    assert values
    assert any(tensor.dtype is torch.bfloat16 for tensor in values)
    for tensor in values:
        assert tensor.float().std() > 0.5


def test_gemm_multiplies_by_the_transposed_weight() -> None:
    kernel, dims = all_kernels()["gemm"], {"m": 3, "n": 5, "k": 7}
    activation, weight = kernel.make_inputs(dims, tensors())
    expected = activation @ weight.T
    torch.testing.assert_close(kernel.bind(dims)(activation, weight), expected)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 6), (4, 4), (3, 8)])
def test_attention_is_causal_from_the_end_of_the_context(q_len: int, kv_len: int) -> None:
    """Compare with the definition, query by query, with grouped heads."""
    dims = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    inputs = attention_inputs(dims, 2, (q_len, kv_len), tensors())
    query, key, value, _ = inputs
    actual = attend(*inputs)
    for head in range(4):
        for position in range(q_len):
            seen = kv_len - q_len + position + 1
            keys, values = key[:, head // 2, :seen], value[:, head // 2, :seen]
            scores = torch.einsum("bd,bkd->bk", query[:, head, position], keys) / 8**0.5
            expected = torch.einsum("bk,bkd->bd", scores.softmax(-1), values)
            torch.testing.assert_close(actual[:, head, position], expected)


def test_ragged_attention_is_refused() -> None:
    dims = {**smallest_point("attention_decode"), "num_seqs": 2, "kv_tokens": 7}
    with pytest.raises(InvalidRequestError, match="ragged"):
        all_kernels()["attention_decode"].make_inputs(dims, tensors())


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
