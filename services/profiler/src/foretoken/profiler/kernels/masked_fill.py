"""Masked scores overwritten in place, as eager attention does before its softmax."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    shape = (dims["q_len"], dims["kv_len"])
    hidden = torch.ones(shape, dtype=torch.bool, device=tensors.device).triu_(1)
    return tensors.random(dims["num_matrices"], *shape), hidden


def _run(scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill_(hidden, 0.0)


def _run_on_a_copy(scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    # A leaf that gets a gradient cannot be overwritten; its gradient is masked all the same.
    return scores.masked_fill(hidden, 0.0)


KERNEL = Kernel(
    operator="masked_fill",
    source="torch.Tensor.masked_fill_",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
    bind_backward=lambda _: _run_on_a_copy,
)
