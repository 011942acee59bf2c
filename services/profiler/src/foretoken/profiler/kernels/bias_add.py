"""Bias of a linear layer, broadcast over the tokens."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    width = dims["hidden"]
    return tensors.random(dims["num_tokens"], width), tensors.random(width)


def _run(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x + bias


KERNEL = Kernel(
    operator="bias_add",
    source="torch.add",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    # The gradient of x is that of the sum: what runs is the sum over tokens.
    differentiable=(1,),
)
