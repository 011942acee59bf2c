"""Gated MLPs of one rank's experts, their rows expert by expert.

Rows are spread evenly over the active experts, as the plain case and as `routing=balanced`, or by a
power law. Even shares differ by one row at most, so two batched products hold them all without
padding. The weights of idle experts are left out: they are not read, and would count in the
rotation of inputs. FP8 as in `moe_experts`.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.expert_rows import (
    NAMED_ROUTINGS,
    SKEWED_ROUTINGS,
    share_rows,
    under_routings,
)
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory
from foretoken.profiler.kernels.moe_experts import grouped_kernels, loop_kernel


def _sizes(dims: Mapping[str, int], routing: str) -> tuple[int, ...]:
    num_pairs, num_active = dims["num_local_pairs"], dims["num_active_experts"]
    if num_active > dims["num_local_experts"]:
        raise InvalidRequestError(
            f"{num_pairs} pairs cannot reach {num_active} of {dims['num_local_experts']} experts"
        )
    return share_rows(num_pairs, num_active, routing, cap=dims["num_tokens"])


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    active, hidden, width = dims["num_active_experts"], dims["hidden"], dims["intermediate"]
    return (
        tensors.random(dims["num_local_pairs"], hidden),
        tensors.random(active, 2 * width, hidden),
        tensors.random(active, hidden, width),
    )


def _bind_batches(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    sizes = _sizes(dims, "")
    num_larger = sizes.count(sizes[-1] + 1)
    cut = num_larger * sizes[0]

    def run(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        if not num_larger:
            return _run_batch(x, up, down)
        return torch.cat(
            (
                _run_batch(x[:cut], up[:num_larger], down[:num_larger]),
                _run_batch(x[cut:], up[num_larger:], down[num_larger:]),
            )
        )

    return run


def _run_batch(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the MLPs' output for rows that lie expert by expert, as many for each."""
    rows = x.unflatten(0, (len(up), -1))
    gate, value = torch.bmm(rows, up.transpose(1, 2)).chunk(2, dim=-1)
    return torch.bmm(functional.silu(gate) * value, down.transpose(1, 2)).flatten(0, 1)


def _kernels(routing: str) -> tuple[Kernel, ...]:
    parts = "moe_local_experts", _make_inputs, functools.partial(_sizes, routing=routing)
    batched = Kernel(
        operator="moe_local_experts",
        source="torch.bmm over experts",
        make_inputs=_make_inputs,
        bind=_bind_batches,
    )
    is_skewed = routing in SKEWED_ROUTINGS
    return *grouped_kernels(*parts), loop_kernel(*parts) if is_skewed else batched


KERNEL = under_routings(_kernels, NAMED_ROUTINGS)
