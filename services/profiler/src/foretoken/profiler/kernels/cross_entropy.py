"""Cross-entropy loss, computed in fp32 whatever the logits are.

`vocab=shard` is one rank's part of a loss whose vocabulary is split over ranks, without the three
reductions between the parts: the largest logit, the target's logit if it is in the shard, the sum
of exponentials; backward, the softmax less one at the target. Source: Megatron-LM,
core/tensor_parallel/cross_entropy.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory

# Targets are drawn from as many shards, so that some are in this one and some are not.
_NUM_SHARDS = 2


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    logits = tensors.random(dims["num_tokens"], dims["vocab"])
    return logits, tensors.integers(dims["vocab"], dims["num_tokens"])


def _run(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), targets)


def _make_shard(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    logits = tensors.random(dims["num_tokens"], dims["vocab"])
    return logits, tensors.integers(_NUM_SHARDS * dims["vocab"], dims["num_tokens"])


class _ShardLoss(torch.autograd.Function):  # type: ignore[misc]
    """A token's loss over the first `vocab` logits of a larger vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        vocab = logits.shape[-1]
        wide = logits.float()
        wide = wide - wide.amax(dim=-1, keepdim=True)
        is_outside = targets >= vocab
        places = targets.masked_fill(is_outside, 0).unsqueeze(-1)
        target_logits = wide.gather(-1, places).squeeze(-1).masked_fill(is_outside, 0.0)
        exponentials = wide.exp_()
        sums = exponentials.sum(dim=-1)
        ctx.save_for_backward(exponentials.div_(sums.unsqueeze(-1)), is_outside, places)
        ctx.dtype = logits.dtype
        return sums.log() - target_logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        softmax, is_outside, places = ctx.saved_tensors
        # The softmax is kept for the next repetition; a framework would overwrite it.
        result = softmax * gradient.unsqueeze(-1)
        at_targets = gradient.masked_fill(is_outside, 0.0).neg().unsqueeze(-1)
        return result.scatter_add_(-1, places, at_targets).to(ctx.dtype), None


def _run_shard(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = _ShardLoss.apply(logits, targets)
    return loss


KERNEL = Kernel(
    operator="cross_entropy",
    source="torch.nn.functional.cross_entropy(float32)",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
    alternatives=(
        Kernel(
            operator="cross_entropy",
            source="torch elementwise (vocabulary shard)",
            variant="vocab=shard",
            make_inputs=_make_shard,
            bind=lambda _: _run_shard,
            differentiable=(0,),
        ),
    ),
)
