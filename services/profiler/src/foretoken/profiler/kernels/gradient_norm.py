"""Norm of gradients in fp32, weighted as that of a group of parameters."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["num_params"], dtype=torch.float32), tensors.random(256)


def _run(gradients: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradients) * weight[0]


KERNEL = Kernel(
    operator="gradient_norm",
    source="torch.linalg.vector_norm",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
)
