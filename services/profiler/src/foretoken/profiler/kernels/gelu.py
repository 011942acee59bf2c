"""Ungated activation, in the tanh form that models use."""

from collections.abc import Mapping

import torch
from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_tokens"], dims["intermediate"]),)


def _run(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


KERNEL = Kernel(
    operator="gelu",
    source="torch.nn.functional.gelu(tanh)",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
)
