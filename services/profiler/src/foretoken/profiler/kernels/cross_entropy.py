"""Cross-entropy loss, computed in fp32 whatever the logits are."""

from collections.abc import Mapping

import torch
from torch.nn import functional

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    logits = tensors.random(dims["num_tokens"], dims["vocab"])
    return logits, tensors.integers(dims["vocab"], dims["num_tokens"])


def _run(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), targets)


KERNEL = Kernel(
    operator="cross_entropy",
    source="torch.nn.functional.cross_entropy(float32)",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
)
