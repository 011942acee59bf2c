"""Residual addition and RMS normalisation: in one kernel where FlashInfer is, in two with torch."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory, has_library, library
from foretoken.profiler.kernels.rms_norm import EPSILON


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    shape = (dims["num_tokens"], dims["hidden"])
    return tensors.random(*shape), tensors.random(*shape), tensors.random(dims["hidden"])


def _bind(dims: Mapping[str, int]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    shape = (dims["hidden"],)

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return functional.rms_norm(total, shape, weight, EPSILON), total

    return run


def _bind_flashinfer(
    _dims: Mapping[str, int],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    norm = library("flashinfer.norm")

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # In place: the sum goes to the residual, its norm to x.
        norm.fused_add_rmsnorm(x, residual, weight, EPSILON)
        return x, residual

    return run


KERNEL = Kernel(
    operator="add_rms_norm",
    source="flashinfer.norm.fused_add_rmsnorm",
    dtypes=frozenset({DType.FP16, DType.BF16}),
    make_inputs=_make_inputs,
    bind=_bind_flashinfer,
    is_present=has_library("flashinfer"),
    alternatives=(
        Kernel(
            operator="add_rms_norm",
            source="torch.add + torch.nn.functional.rms_norm",
            make_inputs=_make_inputs,
            bind=_bind,
            differentiable=(0, 1, 2),
        ),
    ),
)
