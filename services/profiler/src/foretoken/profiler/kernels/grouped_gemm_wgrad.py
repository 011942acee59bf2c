"""The weight gradient of every expert, from rows that lie expert by expert.

Rows are spread evenly over the experts; variants spread them by a power law (`routing=...`).
"""

from collections.abc import Callable, Mapping

import torch

from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.expert_rows import (
    SKEWED_ROUTINGS,
    are_aligned,
    group_ends,
    has_grouped_product,
    share_rows,
    under_routings,
)
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _sizes(dims: Mapping[str, int], routing: str) -> tuple[int, ...]:
    return share_rows(dims["m"], dims["num_groups"], routing)


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["m"], dims["k"]), tensors.random(dims["m"], dims["n"])


def _bind_loop(dims: Mapping[str, int], routing: str) -> Callable[..., torch.Tensor]:
    sizes = _sizes(dims, routing)

    def run(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        pairs = zip(x.split(sizes), gradient.split(sizes), strict=True)
        return torch.stack([part.t() @ rows for rows, part in pairs])

    return run


def _make_grouped(dims: Mapping[str, int], tensors: TensorFactory, routing: str) -> Inputs:
    return *_make_inputs(dims, tensors), group_ends(_sizes(dims, routing), tensors)


def _multiply(x: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(gradient.t(), x, offs=ends)  # noqa: SLF001


def _kernels(routing: str) -> tuple[Kernel, Kernel]:
    return (
        Kernel(
            operator="grouped_gemm_wgrad",
            source="torch._grouped_mm",
            dtypes=frozenset({DType.BF16}),
            make_inputs=lambda dims, tensors: _make_grouped(dims, tensors, routing),
            bind=lambda _: _multiply,
            is_present=has_grouped_product,
            can_run=are_aligned("n", "k"),
        ),
        Kernel(
            operator="grouped_gemm_wgrad",
            source="torch.mm per expert",
            make_inputs=_make_inputs,
            bind=lambda dims: _bind_loop(dims, routing),
        ),
    )


KERNEL = under_routings(_kernels, SKEWED_ROUTINGS)
