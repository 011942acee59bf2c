"""Conversion to 8 bit.

The plain case is that of FP8 training: by a scale known beforehand (here 1), of a tensor and of its
transpose; backward the same for its gradient, in e5m2. Variants find the scale first, as serving
does for activations: the largest of the tensor (`scale=tensor`) or of each token (`scale=token`).
"""

from collections.abc import Mapping
from typing import Any

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory
from foretoken.profiler.scaling import FP8, convert_rows, convert_tensor


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_tokens"], dims["hidden"]),)


def _run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    narrow = x.to(FP8)
    return narrow, narrow.t().contiguous()


class _GradientConversion(torch.autograd.Function):  # type: ignore[misc]
    """The tensor itself; its gradient is converted on the way back."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        narrow = gradient.to(torch.float8_e5m2)
        narrow.t().contiguous()
        return gradient


def _run_for_gradient(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _GradientConversion.apply(x)
    return result


KERNEL = Kernel(
    operator="quantize",
    source="torch.Tensor.to(float8_e4m3fn)",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    bind_backward=lambda _: _run_for_gradient,
    differentiable=(0,),
    alternatives=(
        Kernel(
            operator="quantize",
            source="torch.amax + torch.Tensor.to(float8_e4m3fn)",
            variant="scale=tensor",
            make_inputs=_make_inputs,
            bind=lambda _: convert_tensor,
        ),
        Kernel(
            operator="quantize",
            source="torch.amax + torch.Tensor.to(float8_e4m3fn)",
            variant="scale=token",
            make_inputs=_make_inputs,
            bind=lambda _: convert_rows,
        ),
    ),
)
