"""Residual addition and RMS normalisation; torch has no one kernel for both."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    shape = (dims["num_tokens"], dims["hidden"])
    return tensors.random(*shape), tensors.random(*shape), tensors.random(dims["hidden"])


def _bind(dims: Mapping[str, int]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    shape = (dims["hidden"],)

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return functional.rms_norm(total, shape, weight), total

    return run


KERNEL = Kernel(
    operator="add_rms_norm",
    source="torch.add + torch.nn.functional.rms_norm",
    make_inputs=_make_inputs,
    bind=_bind,
    differentiable=(0, 1, 2),
)
