"""Attention of an encoder over sequences of equal length, nothing masked."""

from collections.abc import Mapping

import torch
from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_seqs, length = dims["num_seqs"], dims["num_tokens"] // dims["num_seqs"]
    shape = num_seqs, dims["num_heads"], length, dims["head_dim"]
    return tensors.random(*shape), tensors.random(*shape), tensors.random(*shape)


def _run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value)


def _is_equal(dims: Mapping[str, int]) -> bool:
    return dims["score_pairs"] * dims["num_seqs"] == dims["num_tokens"] ** 2


KERNEL = Kernel(
    operator="encoder_attention",
    source="torch.nn.functional.scaled_dot_product_attention",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    can_run=_is_equal,
    differentiable=(0, 1, 2),
)
