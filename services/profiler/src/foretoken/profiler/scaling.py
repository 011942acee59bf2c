"""Scales of 8-bit values, and how values are converted to them."""

import torch

from foretoken.profiler.kernel import TensorFactory

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
# So small a largest value would make a scale overflow.
_SMALLEST = 1e-12


def make_scales(tensors: TensorFactory, *shape: int) -> torch.Tensor:
    """Return random scales in fp32, none near 0."""
    return tensors.random(*shape, dtype=torch.float32).abs_().add_(0.5)


def convert_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows in FP8 and the scale of each, [rows, 1]; its largest value sets it."""
    return _convert(x, x.abs().amax(dim=-1, keepdim=True))


def convert_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in FP8 and the one scale of all, which the largest sets."""
    return _convert(x, x.abs().amax())


def _convert(x: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = largest.to(torch.float32).clamp(min=_SMALLEST) / _LARGEST
    return (x / scales).clamp(-_LARGEST, _LARGEST).to(FP8), scales
