"""Sum of a gradient into those of earlier micro batches."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    size = dims["num_params"]
    return tensors.random(size), tensors.random(size)


def _run(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return total.add_(gradient)


KERNEL = Kernel(
    operator="gradient_accumulation",
    source="torch.Tensor.add_",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
)
