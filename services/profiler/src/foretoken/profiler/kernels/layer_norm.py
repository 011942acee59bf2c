"""Layer normalisation."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    hidden = dims["hidden"]
    x = tensors.random(dims["num_tokens"], hidden)
    return x, tensors.random(hidden), tensors.random(hidden)


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    shape = (dims["hidden"],)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, shape, weight, bias)

    return run


KERNEL = Kernel(
    operator="layer_norm",
    source="torch.nn.functional.layer_norm",
    make_inputs=_make_inputs,
    bind=_bind,
    differentiable=(0, 1, 2),
)
