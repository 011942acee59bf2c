"""RMS normalisation: FlashInfer's, torch's own, or the chain of operations that models spell out.

The chain (`form=eager`) is that of transformers' Llama: the mean of squares in fp32, the weight in
the model's own format.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory, has_library, library

EPSILON = 1e-6


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["num_tokens"], dims["hidden"]), tensors.random(dims["hidden"])


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    shape = (dims["hidden"],)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, shape, weight, EPSILON)

    return run


def _run_chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return weight * wide.to(x.dtype)


def _bind_flashinfer(_dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    norm = library("flashinfer.norm")

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = norm.rmsnorm(x, weight, EPSILON)
        return result

    return run


KERNEL = Kernel(
    operator="rms_norm",
    source="flashinfer.norm.rmsnorm",
    dtypes=frozenset({DType.FP16, DType.BF16}),
    make_inputs=_make_inputs,
    bind=_bind_flashinfer,
    is_present=has_library("flashinfer"),
    alternatives=(
        Kernel(
            operator="rms_norm",
            source="torch.nn.functional.rms_norm",
            make_inputs=_make_inputs,
            bind=_bind,
            differentiable=(0, 1),
        ),
        Kernel(
            operator="rms_norm",
            source="torch elementwise",
            variant="form=eager",
            make_inputs=_make_inputs,
            bind=lambda _: _run_chain,
            differentiable=(0, 1),
        ),
    ),
)
