"""One draw per sequence: softmax, then the largest of probabilities over exponential noise."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return (tensors.random(dims["num_seqs"], dims["vocab"]),)


def _run(logits: torch.Tensor) -> torch.Tensor:
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    noise = torch.empty_like(probabilities).exponential_()
    return (probabilities / noise).argmax(dim=-1)


KERNEL = Kernel(
    operator="sampler",
    source="torch.softmax + exponential race",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
)
