"""Hyper-connections before a block: what mixes the streams, and the block's input made of them."""

from collections.abc import Callable, Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_tokens, streams, hidden = (dims[name] for name in ("num_tokens", "num_streams", "hidden"))
    width = streams * hidden
    weights = tensors.random(width, streams * (2 + streams), dtype=torch.float32)
    return tensors.random(num_tokens, streams, hidden), weights


def _bind(dims: Mapping[str, int]) -> Callable[..., tuple[torch.Tensor, ...]]:
    num_streams, num_steps = dims["num_streams"], dims["sinkhorn_steps"]

    def run(residual: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = residual.flatten(1).float()
        scale = wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        # What a learnt factor does in a model: mixes of random weights must not overflow.
        mixes = wide @ weights * (scale * wide.shape[-1] ** -0.5)
        before, after, among = mixes.split((num_streams, num_streams, num_streams**2), dim=-1)
        among = among.unflatten(-1, (num_streams, num_streams)).exp()
        for _ in range(num_steps):
            among = among / among.sum(-1, keepdim=True)
            among = among / among.sum(-2, keepdim=True)
        weighed = before.sigmoid().unsqueeze(1) @ residual.float()
        return weighed.squeeze(1).to(residual.dtype), 2 * after.sigmoid(), among

    return run


KERNEL = Kernel(
    operator="mhc_pre",
    source="torch.matmul + torch elementwise",
    make_inputs=_make_inputs,
    bind=_bind,
)
