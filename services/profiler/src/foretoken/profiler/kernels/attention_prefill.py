"""Causal attention of new tokens over their context, with all sequences of equal length."""

from collections.abc import Callable, Mapping

import torch

from foretoken.profiler.attention import attend, attention_inputs, split_evenly
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    q_len = split_evenly(dims["q_tokens"], dims["num_seqs"])
    kv_len = split_evenly(dims["kv_tokens"], dims["num_seqs"])
    return attention_inputs(dims, dims["num_seqs"], (q_len, kv_len), tensors)


def _bind(_dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    return attend


KERNEL = Kernel(
    operator="attention_prefill",
    source="torch.nn.functional.scaled_dot_product_attention",
    make_inputs=_make_inputs,
    bind=_bind,
    differentiable=(0, 1, 2),
)
