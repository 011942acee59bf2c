"""Gradients of a 16-bit format as fp32."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_params"]),)


def _run(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32, copy=True)


KERNEL = Kernel(
    operator="cast",
    source="torch.Tensor.to",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
)
