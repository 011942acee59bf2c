"""The inputs of Mamba2's kernels, and what they compute from them."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.profiler.attention.recurrence import Tokens, zeros_of_state
from foretoken.profiler.kernel import Inputs, TensorFactory

# Tokens of a chunk. Source: `chunk_size` of Nemotron 3's configuration.
CHUNK = 128

Recur = Callable[[Tokens, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    """Return x, step, B and C [seqs, tokens, ...], A and D by head, and the state."""
    num_seqs, num_heads, groups = dims["num_seqs"], dims["num_heads"], dims["num_groups"]
    length, state_dim = dims["num_tokens"] // num_seqs, dims["state_dim"]
    return (
        tensors.random(num_seqs, length, num_heads, dims["head_dim"]),
        tensors.random(num_seqs, length, num_heads),
        tensors.random(num_seqs, length, groups, state_dim),
        tensors.random(num_seqs, length, groups, state_dim),
        tensors.random(num_heads),
        tensors.random(num_heads),
        zeros_of_state(tensors, num_seqs, num_heads, state_dim, dims["head_dim"]),
    )


def bind_scan(recur: Recur) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the scan; a state decays by the exponential of minus step times e^A."""

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, step, into, out, log_a, skip, state = inputs
        group = x.shape[2] // into.shape[2]
        step = functional.softplus(step.float())
        tokens = Tokens(
            query=out.repeat_interleave(group, 2).transpose(1, 2),
            key=into.repeat_interleave(group, 2).transpose(1, 2),
            value=(x * step.unsqueeze(-1)).transpose(1, 2),
            log_decay=-(step * log_a.float().exp()).unsqueeze(-1).transpose(1, 2),
        )
        output, state = recur(tokens, state)
        return (output.transpose(1, 2) + x * skip.float().unsqueeze(-1)).to(x.dtype), state

    return run
