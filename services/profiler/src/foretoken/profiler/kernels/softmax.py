"""Softmax over the last dimension."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_rows"], dims["width"]),)


def _run(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores, dim=-1)


KERNEL = Kernel(
    operator="softmax",
    source="torch.softmax",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
)
