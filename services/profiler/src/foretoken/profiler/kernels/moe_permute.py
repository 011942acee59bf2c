"""Rows gathered in the order of experts, each token `top_k` times at random places."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_rows = dims["num_tokens"] * dims["top_k"]
    order = tensors.distinct_integers(num_rows, num_rows) % dims["num_tokens"]
    return tensors.random(dims["num_tokens"], dims["hidden"]), order


def _run(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, order)


KERNEL = Kernel(
    operator="moe_permute",
    source="torch.index_select",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
)
