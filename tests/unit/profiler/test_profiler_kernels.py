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
    kernel_of_call,
    prepare_case,
)
from foretoken.profiler.kernels.sampler import TOP_K, TOP_P

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


def _tensors(dtype: torch.dtype = torch.float32) -> TensorFactory:
    return TensorFactory(torch.device("cpu"), dtype, seed=1)


def test_a_causal_softmax_spreads_each_query_over_the_keys_before_it() -> None:
    kernel, dims = all_kernels()["causal_softmax"], {"num_matrices": 2, "length": 4}
    weights = kernel.bind(dims)(*kernel.make_inputs(dims, _tensors()))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4))
    assert 0 == torch.count_nonzero(weights.triu(1))
    assert 2 * (4 * 5 // 2) == torch.count_nonzero(weights)


def test_a_masked_fill_overwrites_the_scores_themselves() -> None:
    kernel, dims = all_kernels()["masked_fill"], {"num_matrices": 2, "q_len": 3, "kv_len": 3}
    scores, hidden = kernel.make_inputs(dims, _tensors())
    kept = scores.clone().tril()
    kernel.bind(dims)(scores, hidden)
    torch.testing.assert_close(kept, scores)


def test_a_fused_update_moves_every_tensor_of_the_list_in_its_own_format() -> None:
    kernel, dims = all_kernels()["fused_adam"], {"num_params": 60, "num_tensors": 3}
    inputs = kernel.make_inputs(dims, _tensors(torch.bfloat16))
    before = [tensor.clone() for tensor in inputs[:4]]
    kernel.bind(dims)(*inputs)
    parameters, gradients, first_moments, _ = inputs[:4]
    assert torch.bfloat16 is parameters.dtype
    assert torch.equal(before[1], gradients)
    for moved, old in ((parameters, before[0]), (first_moments, before[2])):
        assert all(
            not torch.equal(part, was)
            for part, was in zip(moved.tensor_split(3), old.tensor_split(3), strict=True)
        )


def test_a_batched_product_multiplies_matrix_by_matrix() -> None:
    kernel, dims = all_kernels()["batched_gemm"], {"batch": 2, "m": 3, "n": 4, "k": 5}
    left, right = kernel.make_inputs(dims, _tensors())
    expected = torch.stack([a @ b for a, b in zip(left, right, strict=True)])
    torch.testing.assert_close(expected, kernel.bind(dims)(left, right))


_DIMS = {"num_seqs": 200, "vocab": 300}


def _sample(variant: str, logits: torch.Tensor) -> torch.Tensor:
    call = OperatorCall(operator="sampler", dtype=DType.FP32, variant=variant)
    kernel = kernel_of_call(call, torch.device("cpu"))
    drawn: torch.Tensor = kernel.bind(_DIMS)(logits)
    return drawn


def _logits() -> torch.Tensor:
    tensors = TensorFactory(torch.device("cpu"), torch.float32, seed=1)
    return 2.0 * tensors.random(_DIMS["num_seqs"], _DIMS["vocab"])


def _ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of a row are likelier than the one drawn."""
    drawn = logits.gather(1, tokens.unsqueeze(1))
    return (logits > drawn).sum(dim=1)


def test_a_greedy_sampler_takes_the_likeliest() -> None:
    logits = _logits()
    assert 0 == int(_ranks(logits, _sample("sampling=greedy", logits)).max())


def test_the_likeliest_few_are_all_that_is_drawn_from() -> None:
    logits = _logits()
    ranks = _ranks(logits, _sample("sampling=top_k", logits))
    assert 1 <= int(ranks.max()) < TOP_K


@pytest.mark.parametrize("variant", ["sampling=top_p", "sampling=top_k_top_p"])
def test_tokens_come_from_the_smallest_set_that_reaches_the_limit(variant: str) -> None:
    logits = _logits()
    tokens = _sample(variant, logits)
    if variant == "sampling=top_k_top_p":
        least = logits.topk(TOP_K, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    chances = logits.double().softmax(dim=1)
    drawn = chances.gather(1, tokens.unsqueeze(1))
    before = chances.masked_fill(chances <= drawn, 0.0).sum(dim=1)
    assert float(before.max()) < TOP_P
    assert 1 <= int(_ranks(logits, tokens).max())


@pytest.mark.parametrize(
    "variant", ["", "sampling=top_k", "sampling=top_p", "sampling=top_k_top_p"]
)
def test_tokens_are_drawn_as_often_as_they_are_likely(variant: str) -> None:
    """Three tokens that no limit cuts off, at 1, 2 and 5 in 8."""
    torch.manual_seed(1)
    row = torch.full((_DIMS["vocab"],), -100.0)
    row[[7, 70, 170]] = torch.tensor([1.0, 2.0, 5.0]).log()
    tokens = torch.cat(
        [_sample(variant, row.expand(_DIMS["num_seqs"], -1).contiguous()) for _ in range(40)]
    )
    shares = torch.tensor([(tokens == token).float().mean() for token in (7, 70, 170)])
    # Three standard deviations of 8000 draws.
    torch.testing.assert_close(torch.tensor([1.0, 2.0, 5.0]) / 8, shares, atol=0.017, rtol=0.0)
