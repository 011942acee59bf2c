"""Ungated activation in the tanh form: torch's own, or the chain that GPT-2's model spells out."""

import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory

# Source: Hendrycks and Gimpel, 1606.08415.
_CUBIC = 0.044715


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_tokens"], dims["intermediate"]),)


def _run(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _run_chain(x: torch.Tensor) -> torch.Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + _CUBIC * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


KERNEL = Kernel(
    operator="gelu",
    source="torch.nn.functional.gelu(tanh)",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
    alternatives=(
        Kernel(
            operator="gelu",
            source="torch elementwise",
            variant="form=eager",
            make_inputs=_make_inputs,
            bind=lambda _: _run_chain,
            differentiable=(0,),
        ),
    ),
)
