"""Hyper-connections after a block: the streams mixed, and the block's output added to each."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_tokens, streams, hidden = (dims[name] for name in ("num_tokens", "num_streams", "hidden"))
    return (
        tensors.random(num_tokens, hidden),
        tensors.random(num_tokens, streams, hidden),
        tensors.random(num_tokens, streams),
        tensors.random(num_tokens, streams, streams),
    )


def _run(
    x: torch.Tensor, residual: torch.Tensor, after: torch.Tensor, among: torch.Tensor
) -> torch.Tensor:
    return torch.baddbmm(after.unsqueeze(-1) * x.unsqueeze(1), among, residual)


KERNEL = Kernel(
    operator="mhc_post",
    source="torch.baddbmm",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
)
