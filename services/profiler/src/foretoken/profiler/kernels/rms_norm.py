"""RMS normalisation."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["num_tokens"], dims["hidden"]), tensors.random(dims["hidden"])


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    shape = (dims["hidden"],)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, shape, weight)

    return run


KERNEL = Kernel(
    operator="rms_norm",
    source="torch.nn.functional.rms_norm",
    make_inputs=_make_inputs,
    bind=_bind,
    differentiable=(0, 1),
)
