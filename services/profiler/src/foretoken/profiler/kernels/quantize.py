"""Conversion to 8 bit, of a tensor and of its transpose."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_tokens"], dims["hidden"]),)


def _run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    narrow = x.to(torch.float8_e4m3fn)
    return narrow, narrow.t().contiguous()


KERNEL = Kernel(
    operator="quantize",
    source="torch.Tensor.to(float8_e4m3fn)",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
)
