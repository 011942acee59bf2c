"""The short causal convolution over new tokens, or over the next ones after a state."""

from collections.abc import Mapping

import torch
from torch.nn import functional

from foretoken.profiler.attention.recurrence import has_equal_sequences
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory

SOURCE = "torch.nn.functional.conv1d + torch.nn.functional.silu"


def make_conv_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    """Return tokens and state [seqs, channels, tokens], and weights [channels, 1, kernel size]."""
    num_seqs, channels, width = dims["num_seqs"], dims["channels"], dims["kernel_size"]
    return (
        tensors.random(num_seqs, channels, dims["num_tokens"] // num_seqs),
        tensors.random(num_seqs, channels, width - 1),
        tensors.random(channels, 1, width),
    )


def run_conv(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs, and the last tokens as the next state."""
    seen = torch.cat((state, x), dim=-1)
    output = functional.silu(functional.conv1d(seen, weight, groups=len(weight)))
    return output, seen[..., seen.shape[-1] - state.shape[-1] :].contiguous()


KERNEL = Kernel(
    operator="causal_conv_prefill",
    source=SOURCE,
    make_inputs=make_conv_inputs,
    bind=lambda _: run_conv,
    can_run=has_equal_sequences,
)
