"""The small kernels that training frameworks run by themselves."""

import torch

from foretoken.profiler.kernel import TensorFactory, all_kernels

_ROWS = {"num_tokens": 6, "hidden": 4}


def _tensors(dtype: torch.dtype = torch.float32) -> TensorFactory:
    return TensorFactory(torch.device("cpu"), dtype, seed=1)


def test_a_bias_is_added_to_every_token_and_its_gradient_summed_over_them() -> None:
    kernel = all_kernels()["bias_add"]
    x, bias = kernel.make_inputs(_ROWS, _tensors())
    bias.requires_grad_()
    result = kernel.bind(_ROWS)(x, bias)
    torch.testing.assert_close(x + bias.expand(6, 4), result)
    result.backward(torch.ones_like(result))
    assert bias.grad is not None
    torch.testing.assert_close(torch.full((4,), 6.0), bias.grad)


def test_a_copy_lays_the_sequences_of_a_batch_side_by_side() -> None:
    kernel = all_kernels()["copy"]
    (x,) = kernel.make_inputs(_ROWS, _tensors())
    result = kernel.bind(_ROWS)(x)
    assert ((2, 3, 4), (3, 2, 4)) == (tuple(x.shape), tuple(result.shape))
    assert result.is_contiguous()
    torch.testing.assert_close(x[1, 2], result[2, 1])


def test_gradients_are_added_up_in_place() -> None:
    kernel, dims = all_kernels()["gradient_accumulation"], {"num_params": 8}
    total, gradient = kernel.make_inputs(dims, _tensors())
    expected = total + gradient
    kernel.bind(dims)(total, gradient)
    torch.testing.assert_close(expected, total)


def test_dropout_keeps_nine_of_ten_values_larger() -> None:
    kernel, dims = all_kernels()["dropout"], {"num_tokens": 100, "hidden": 100}
    (x,) = kernel.make_inputs(dims, _tensors())
    result = kernel.bind(dims)(x)
    kept = result != 0
    assert 0.85 < kept.float().mean() < 0.95
    torch.testing.assert_close(x[kept] / 0.9, result[kept])


def test_flat_kernels_do_what_they_say() -> None:
    dims = {"num_params": 8}
    kernels = all_kernels()
    results = {}
    for name in ("cast", "buffer_copy", "fill"):
        inputs = kernels[name].make_inputs(dims, _tensors(torch.bfloat16))
        before = inputs[0].clone()
        results[name] = (before, kernels[name].bind(dims)(*inputs))
    assert torch.float32 is results["cast"][1].dtype
    assert torch.equal(*results["buffer_copy"])
    assert 0 == torch.count_nonzero(results["fill"][1])


def test_norms_and_divisions_work_on_fp32() -> None:
    dims = {"num_params": 8}
    norm, unscale = (all_kernels()[name] for name in ("gradient_norm", "unscale"))
    gradients, factor = norm.make_inputs(dims, _tensors(torch.bfloat16))
    assert torch.float32 is gradients.dtype
    expected = gradients.square().sum().sqrt() * factor[0]
    torch.testing.assert_close(expected, norm.bind(dims)(gradients, factor))
    expected = gradients * factor[0]
    torch.testing.assert_close(expected, unscale.bind(dims)(gradients, factor))


def test_products_and_conversions_do_what_they_say() -> None:
    kernels, dims = all_kernels(), {"num_tokens": 3, "intermediate": 4}
    x, gate = kernels["product"].make_inputs(dims, _tensors())
    torch.testing.assert_close(x * gate, kernels["product"].bind(dims)(x, gate))
    (x,) = kernels["norm_upcast"].make_inputs(_ROWS, _tensors(torch.bfloat16))
    assert torch.float32 is kernels["norm_upcast"].bind(_ROWS)(x).dtype
    narrow, transposed = kernels["quantize"].bind(_ROWS)(x)
    assert ((6, 4), (4, 6)) == (tuple(narrow.shape), tuple(transposed.shape))
