"""Values of 16 bit as fp32 (plain), or back (`direction=narrow`)."""

from collections.abc import Mapping

import torch

from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_params"]),)


def _run(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32, copy=True)


def _make_wide(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    # The result goes where the parameters lie.
    size = dims["num_params"]
    return tensors.random(size, dtype=torch.float32), tensors.random(size)


def _run_narrow(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return target.copy_(x)


KERNEL = Kernel(
    operator="cast",
    source="torch.Tensor.to",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    alternatives=(
        Kernel(
            operator="cast",
            source="torch.Tensor.copy_",
            variant="direction=narrow",
            dtypes=frozenset({DType.FP16, DType.BF16}),
            make_inputs=_make_wide,
            bind=lambda _: _run_narrow,
        ),
    ),
)
