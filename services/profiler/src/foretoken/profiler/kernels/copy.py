"""Copy that makes a tensor contiguous whose tokens lie batch first, as PyTorch runs it."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    # Two sequences where the tokens divide: their rows change places, features stay together.
    num_seqs = 2 if dims["num_tokens"] % 2 == 0 else 1
    return (tensors.random(num_seqs, dims["num_tokens"] // num_seqs, dims["hidden"]),)


def _run(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format)


KERNEL = Kernel(
    operator="copy",
    source="torch.Tensor.contiguous",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    differentiable=(0,),
)
