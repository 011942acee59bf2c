"""Rotary position embedding in torch's elementwise operators, halves rotated as Llama does."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_tokens, head_dim = dims["num_tokens"], dims["head_dim"]
    return (
        tensors.random(num_tokens, dims["num_heads"], head_dim),
        tensors.random(num_tokens, dims["num_kv_heads"], head_dim),
        tensors.random(num_tokens, 1, head_dim),
        tensors.random(num_tokens, 1, head_dim),
    )


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` with its last dimension rotated; `cos` and `sin` broadcast to it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _run(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotate_halves(query, cos, sin), rotate_halves(key, cos, sin)


KERNEL = Kernel(
    operator="rope",
    source="torch elementwise (rotate halves)",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0, 1),
)
