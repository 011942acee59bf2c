"""Zeros written to a flat tensor."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_params"]),)


def _run(x: torch.Tensor) -> torch.Tensor:
    return x.zero_()


KERNEL = Kernel(
    operator="fill",
    source="torch.Tensor.zero_",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
)
