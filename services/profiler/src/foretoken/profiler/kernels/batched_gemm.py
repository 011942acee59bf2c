"""Batched matrix multiplication."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    batch, m, n, k = (dims[name] for name in ("batch", "m", "n", "k"))
    return tensors.random(batch, m, k), tensors.random(batch, k, n)


KERNEL = Kernel(
    operator="batched_gemm",
    source="torch.bmm",
    make_inputs=_make_inputs,
    bind=lambda _: torch.bmm,
    differentiable=(0, 1),
)
