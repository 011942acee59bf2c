"""Rotary position embedding, halves rotated as Llama does.

FlashInfer rotates in one kernel, in place. torch has none: its chain of elementwise operations is
the plain case where nothing better is installed, and always `form=eager`, there over [1, heads,
tokens, features] views as transformers has them.
"""

from collections.abc import Callable, Mapping

import torch

from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory, has_library, library


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


def _run_transposed(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    views = [tensor.unsqueeze(0).transpose(1, 2) for tensor in (query, key, cos, sin)]
    return rotate_halves(views[0], *views[2:]), rotate_halves(views[1], *views[2:])


def _make_flashinfer(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_tokens, head_dim = dims["num_tokens"], dims["head_dim"]
    return (
        torch.arange(num_tokens, device=tensors.device),
        tensors.random(num_tokens, dims["num_heads"] * head_dim),
        tensors.random(num_tokens, dims["num_kv_heads"] * head_dim),
        tensors.random(num_tokens, head_dim, dtype=torch.float32),
    )


def _bind_flashinfer(dims: Mapping[str, int]) -> Callable[..., None]:
    rope, head_dim = library("flashinfer.rope"), dims["head_dim"]

    def run(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor
    ) -> None:
        rope.apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_dim, table)

    return run


KERNEL = Kernel(
    operator="rope",
    source="flashinfer.rope.apply_rope_with_cos_sin_cache_inplace",
    dtypes=frozenset({DType.FP16, DType.BF16}),
    make_inputs=_make_flashinfer,
    bind=_bind_flashinfer,
    is_present=has_library("flashinfer"),
    alternatives=(
        Kernel(
            operator="rope",
            source="torch elementwise (rotate halves)",
            make_inputs=_make_inputs,
            bind=lambda _: _run,
            differentiable=(0, 1),
        ),
        Kernel(
            operator="rope",
            source="torch elementwise (rotate halves)",
            variant="form=eager",
            make_inputs=_make_inputs,
            bind=lambda _: _run_transposed,
            differentiable=(0, 1),
        ),
    ),
)
