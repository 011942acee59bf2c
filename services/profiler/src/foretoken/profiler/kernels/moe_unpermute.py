"""Rows gathered back in the order of tokens and added up over each token's experts."""

from collections.abc import Callable, Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_rows = dims["num_tokens"] * dims["top_k"]
    return tensors.random(num_rows, dims["hidden"]), tensors.distinct_integers(num_rows, num_rows)


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    shape = (dims["num_tokens"], dims["top_k"], dims["hidden"])

    def run(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, order).view(shape).sum(1)

    return run


KERNEL = Kernel(
    operator="moe_unpermute",
    source="torch.index_select and sum",
    make_inputs=_make_inputs,
    bind=_bind,
    differentiable=(0,),
)
