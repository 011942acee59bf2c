"""Gated activation over one [tokens, 2 * intermediate] input."""

from collections.abc import Mapping

import torch
from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_tokens"], 2 * dims["intermediate"]),)


def _run(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


KERNEL = Kernel(
    operator="silu_mul",
    source="torch.nn.functional.silu + torch.mul",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
)
