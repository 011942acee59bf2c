"""Softmax under the causal mask, of the operations that PyTorch has for it."""

from collections.abc import Callable, Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    length = dims["length"]
    hidden = torch.ones(length, length, dtype=torch.bool, device=tensors.device).triu_(1)
    return tensors.random(dims["num_matrices"], length, length), hidden


def _bind(_dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    scale = 0.5

    def run(scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.softmax((scores * scale).masked_fill(hidden, -torch.inf), dim=-1)

    return run


KERNEL = Kernel(
    operator="causal_softmax",
    source="torch.softmax(masked_fill)",
    make_inputs=_make_inputs,
    bind=_bind,
    differentiable=(0,),
)
