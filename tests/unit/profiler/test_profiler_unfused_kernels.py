"""The kernels of unfused attention and of an optimizer without master weights."""

import torch

from foretoken.profiler.kernel import TensorFactory, all_kernels


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
