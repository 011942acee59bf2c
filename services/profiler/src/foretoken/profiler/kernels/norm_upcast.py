"""Conversion to fp32; the norm that reads it is not part of this."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_tokens"], dims["hidden"]),)


def _run(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32, copy=True)


KERNEL = Kernel(
    operator="norm_upcast",
    source="torch.Tensor.to",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
)
