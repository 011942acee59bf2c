"""Gated MLPs of the experts that received tokens, their rows expert by expert.

Rows are spread evenly over the active experts, as the plain case and as `routing=balanced`, or by a
power law. The weights of idle experts are left out: they are not read, and would count in the
rotation of inputs. In FP8 tokens come in converted, and what is between the two products is
converted, too, with a scale for every row.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.expert_rows import (
    NAMED_ROUTINGS,
    are_aligned,
    group_ends,
    has_grouped_product,
    has_scaled_grouped_product,
    multiply_scaled_groups,
    share_rows,
    under_routings,
)
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory
from foretoken.profiler.scaling import convert_rows, make_scales


def _sizes(dims: Mapping[str, int], routing: str) -> tuple[int, ...]:
    num_tokens, num_active = dims["num_tokens"], dims["num_active_experts"]
    return share_rows(num_tokens * dims["top_k"], num_active, routing, cap=num_tokens)


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    active, hidden, width = dims["num_active_experts"], dims["hidden"], dims["intermediate"]
    return (
        tensors.random(dims["num_tokens"] * dims["top_k"], hidden),
        tensors.random(active, 2 * width, hidden),
        tensors.random(active, hidden, width),
    )


def _run_loop(
    sizes: tuple[int, ...], x: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Return the MLPs' output, one expert after the other; weights are stored [out, in]."""
    parts = []
    for rows, expert_up, expert_down in zip(
        x.split(sizes), up.unbind(), down.unbind(), strict=True
    ):
        gate, value = functional.linear(rows, expert_up).chunk(2, dim=-1)
        parts.append(functional.linear(functional.silu(gate) * value, expert_down))
    return torch.cat(parts)


def _run_grouped(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Return the MLPs' output by two grouped products; weights are stored [out, in]."""
    hidden = torch._grouped_mm(x, up.transpose(-2, -1), offs=ends)  # noqa: SLF001
    gate, value = hidden.chunk(2, dim=-1)
    products = functional.silu(gate) * value
    return torch._grouped_mm(products, down.transpose(-2, -1), offs=ends)  # noqa: SLF001


def _run_scaled(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor, *scales: torch.Tensor
) -> torch.Tensor:
    """Return the MLPs' output in bf16 by two grouped products in FP8."""
    x_scales, up_scales, down_scales = scales
    hidden = multiply_scaled_groups(x, up, (x_scales, up_scales), ends)
    gate, value = hidden.chunk(2, dim=-1)
    narrow, row_scales = convert_rows(functional.silu(gate) * value)
    return multiply_scaled_groups(narrow, down, (row_scales.squeeze(-1), down_scales), ends)


def grouped_kernels(
    operator: str,
    make_inputs: Callable[[Mapping[str, int], TensorFactory], Inputs],
    sizes_of: Callable[[Mapping[str, int]], tuple[int, ...]],
) -> tuple[Kernel, Kernel]:
    """Return the kernels in bf16 and in FP8 that multiply the rows of all experts at once.

    `make_inputs` gives rows and both weights, `sizes_of` the rows of each expert.
    """

    def make_grouped(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
        return *make_inputs(dims, tensors), group_ends(sizes_of(dims), tensors)

    def make_scaled(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
        x, up, down, ends = make_grouped(dims, tensors)
        scales = (
            make_scales(tensors, len(x)),
            make_scales(tensors, *up.shape[:2]),
            make_scales(tensors, *down.shape[:2]),
        )
        return x, up, down, ends, *scales

    return (
        Kernel(
            operator=operator,
            source="torch._grouped_mm",
            dtypes=frozenset({DType.BF16}),
            make_inputs=make_grouped,
            bind=lambda _: _run_grouped,
            is_present=has_grouped_product,
            can_run=are_aligned("hidden", "intermediate"),
        ),
        Kernel(
            operator=operator,
            source="torch._scaled_grouped_mm",
            dtypes=frozenset({DType.FP8}),
            make_inputs=make_scaled,
            bind=lambda _: _run_scaled,
            is_present=has_scaled_grouped_product,
            can_run=are_aligned("hidden", "intermediate", num_bytes=1),
        ),
    )


def loop_kernel(
    operator: str,
    make_inputs: Callable[[Mapping[str, int], TensorFactory], Inputs],
    sizes_of: Callable[[Mapping[str, int]], tuple[int, ...]],
) -> Kernel:
    """Return the kernel that runs one expert after the other."""

    def bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
        sizes = sizes_of(dims)
        return lambda x, up, down: _run_loop(sizes, x, up, down)

    return Kernel(
        operator=operator,
        source="torch.nn.functional.linear per expert",
        make_inputs=make_inputs,
        bind=bind,
    )


def _kernels(routing: str) -> tuple[Kernel, ...]:
    parts = "moe_experts", _make_inputs, functools.partial(_sizes, routing=routing)
    return *grouped_kernels(*parts), loop_kernel(*parts)


KERNEL = under_routings(_kernels, NAMED_ROUTINGS)
