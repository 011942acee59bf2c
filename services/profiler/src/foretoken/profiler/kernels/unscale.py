"""Gradients in fp32 divided by a factor, in place."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["num_params"], dtype=torch.float32), tensors.random(256)


def _run(gradients: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return gradients.mul_(factor[0])


KERNEL = Kernel(
    operator="unscale",
    source="torch.Tensor.mul_",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
)
