"""Dropout with its mask."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_tokens"], dims["hidden"]),)


def _run(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, p=0.1)


KERNEL = Kernel(
    operator="dropout",
    source="torch.nn.functional.dropout",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
)
