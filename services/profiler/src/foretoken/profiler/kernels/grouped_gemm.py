"""One product per expert, weights stored [out, in] as models hold them.

Rows are spread evenly over the experts; variants spread them by a power law (`routing=...`). FP8
has a scale for every row and every output feature; its input gradient is another product like it.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.expert_rows import (
    SKEWED_ROUTINGS,
    are_aligned,
    group_ends,
    has_grouped_product,
    has_scaled_grouped_product,
    multiply_scaled_groups,
    share_rows,
    under_routings,
)
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory
from foretoken.profiler.scaling import make_scales


def _sizes(dims: Mapping[str, int], routing: str) -> tuple[int, ...]:
    return share_rows(dims["m"], dims["num_groups"], routing)


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (
        tensors.random(dims["m"], dims["k"]),
        tensors.random(dims["num_groups"], dims["n"], dims["k"]),
    )


def _bind_loop(dims: Mapping[str, int], routing: str) -> Callable[..., torch.Tensor]:
    sizes = _sizes(dims, routing)

    def run(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs = zip(x.split(sizes), weights.unbind(), strict=True)
        return torch.cat([functional.linear(rows, weight) for rows, weight in pairs])

    return run


def _make_grouped(dims: Mapping[str, int], tensors: TensorFactory, routing: str) -> Inputs:
    return *_make_inputs(dims, tensors), group_ends(_sizes(dims, routing), tensors)


def _multiply(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, weights.transpose(-2, -1), offs=ends)  # noqa: SLF001


def _make_scaled(dims: Mapping[str, int], tensors: TensorFactory, routing: str) -> Inputs:
    x, weights, ends = _make_grouped(dims, tensors, routing)
    return x, weights, make_scales(tensors, len(x)), make_scales(tensors, *weights.shape[:2]), ends


def _multiply_scaled(
    x: torch.Tensor,
    weights: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    return multiply_scaled_groups(x, weights, (x_scales, weight_scales), ends)


def _kernels(routing: str) -> tuple[Kernel, ...]:
    return (
        Kernel(
            operator="grouped_gemm",
            source="torch._grouped_mm",
            dtypes=frozenset({DType.BF16}),
            make_inputs=lambda dims, tensors: _make_grouped(dims, tensors, routing),
            bind=lambda _: _multiply,
            differentiable=(0, 1),
            is_present=has_grouped_product,
            can_run=are_aligned("n", "k"),
        ),
        Kernel(
            operator="grouped_gemm",
            source="torch.nn.functional.linear per expert",
            make_inputs=_make_inputs,
            bind=lambda dims: _bind_loop(dims, routing),
            differentiable=(0, 1),
        ),
        Kernel(
            operator="grouped_gemm",
            source="torch._scaled_grouped_mm",
            dtypes=frozenset({DType.FP8}),
            make_inputs=lambda dims, tensors: _make_scaled(dims, tensors, routing),
            bind=lambda _: _multiply_scaled,
            is_present=has_scaled_grouped_product,
            can_run=are_aligned("n", "k", num_bytes=1),
        ),
    )


KERNEL = under_routings(_kernels, SKEWED_ROUTINGS)
