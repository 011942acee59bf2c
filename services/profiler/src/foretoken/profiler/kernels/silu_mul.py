"""Gated activation over one [tokens, 2 * intermediate] input; torch takes two kernels for it."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory, has_library, library

# FlashInfer reads 16 bytes at a time. Source: flashinfer/activation.py.
_VECTOR_ELEMENTS = 8


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_tokens"], 2 * dims["intermediate"]),)


def _run(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _bind_flashinfer(_dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    activation = library("flashinfer.activation")

    def run(gate_and_up: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = activation.silu_and_mul(gate_and_up)
        return result

    return run


KERNEL = Kernel(
    operator="silu_mul",
    source="flashinfer.activation.silu_and_mul",
    dtypes=frozenset({DType.FP16, DType.BF16}),
    make_inputs=_make_inputs,
    bind=_bind_flashinfer,
    is_present=has_library("flashinfer"),
    can_run=lambda dims: dims["intermediate"] % _VECTOR_ELEMENTS == 0,
    alternatives=(
        Kernel(
            operator="silu_mul",
            source="torch.nn.functional.silu + torch.mul",
            make_inputs=_make_inputs,
            bind=lambda _: _run,
            differentiable=(0,),
        ),
    ),
)
