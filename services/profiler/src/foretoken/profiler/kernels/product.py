"""Product of two tensors."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    shape = (dims["num_tokens"], dims["intermediate"])
    return tensors.random(*shape), tensors.random(*shape)


def _run(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * gate


KERNEL = Kernel(
    operator="product",
    source="torch.mul",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0, 1),
)
