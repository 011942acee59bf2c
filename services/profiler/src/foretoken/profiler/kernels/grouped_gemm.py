"""One product per expert, one after the other; the rows are spread evenly over the experts."""

from collections.abc import Callable, Mapping

import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (
        tensors.random(dims["m"], dims["k"]),
        tensors.random(dims["num_groups"], dims["k"], dims["n"]),
    )


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    num_rows, num_groups = dims["m"], dims["num_groups"]
    if num_rows < num_groups:
        raise InvalidRequestError(f"{num_rows} rows cannot reach {num_groups} experts")

    def run(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = x.tensor_split(num_groups)
        return torch.cat([rows @ weight for rows, weight in zip(parts, weights, strict=True)])

    return run


KERNEL = Kernel(
    operator="grouped_gemm",
    source="torch.mm per expert",
    make_inputs=_make_inputs,
    bind=_bind,
    differentiable=(0, 1),
)
