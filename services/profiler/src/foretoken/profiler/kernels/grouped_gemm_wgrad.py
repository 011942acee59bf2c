"""The weight gradient of every expert, one after the other, from evenly spread rows."""

from collections.abc import Callable, Mapping

import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["m"], dims["k"]), tensors.random(dims["m"], dims["n"])


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    num_rows, num_groups = dims["m"], dims["num_groups"]
    if num_rows < num_groups:
        raise InvalidRequestError(f"{num_rows} rows cannot reach {num_groups} experts")

    def run(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        pairs = zip(x.tensor_split(num_groups), gradient.tensor_split(num_groups), strict=True)
        return torch.stack([rows.T @ part for rows, part in pairs])

    return run


KERNEL = Kernel(
    operator="grouped_gemm_wgrad",
    source="torch.mm per expert",
    make_inputs=_make_inputs,
    bind=_bind,
)
