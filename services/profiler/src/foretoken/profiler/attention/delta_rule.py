"""The inputs of the delta rule's kernels, and what they compute from them.

Queries and keys are normalised in the kernel, gates come as the projections give them.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from foretoken.profiler.attention.recurrence import (
    Tokens,
    scan_chunks,
    step_tokens,
    zeros_of_state,
)
from foretoken.profiler.kernel import Inputs, TensorFactory

# Tokens of a chunk. Source: flash-linear-attention; by feature, 16 times a log decay of at least -5
# stays in fp32.
GATED_CHUNK, FEATURE_CHUNK = 64, 16
# The strongest log decay of a feature. Source: `gate_lower_bound` of Kimi-K3's configuration.
_LOWEST_LOG_DECAY = -5.0

Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def make_gated_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    """Return query, key, value, decay and strength [seqs, tokens, heads, ...], and the state."""
    num_seqs, num_k, num_v = dims["num_seqs"], dims["num_k_heads"], dims["num_v_heads"]
    length, k_dim, v_dim = dims["num_tokens"] // num_seqs, dims["head_k_dim"], dims["head_v_dim"]
    return (
        tensors.random(num_seqs, length, num_k, k_dim),
        tensors.random(num_seqs, length, num_k, k_dim),
        tensors.random(num_seqs, length, num_v, v_dim),
        tensors.random(num_seqs, length, num_v),
        tensors.random(num_seqs, length, num_v),
        zeros_of_state(tensors, num_seqs, num_v, k_dim, v_dim),
    )


def make_feature_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    """Return the same with a decay for each feature of a key."""
    num_seqs, num_heads, head_dim = dims["num_seqs"], dims["num_heads"], dims["head_dim"]
    length = dims["num_tokens"] // num_seqs
    vectors = [tensors.random(num_seqs, length, num_heads, head_dim) for _ in range(4)]
    strength = tensors.random(num_seqs, length, num_heads)
    return *vectors, strength, zeros_of_state(tensors, num_seqs, num_heads, head_dim, head_dim)


def bind_prefill(chunk: int) -> Run:
    """Return the rule over whole sequences in chunks; outputs in the inputs' format."""

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, state = scan_chunks(_tokens_of(*inputs[:-1]), inputs[-1], chunk)
        return output.transpose(1, 2).to(inputs[0].dtype), state

    return run


def run_decode(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rule for the next tokens of each sequence, one after the other."""
    output, state = step_tokens(_tokens_of(*inputs[:-1]), inputs[-1])
    return output.transpose(1, 2).to(inputs[0].dtype), state


def _tokens_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> Tokens:
    group = value.shape[2] // query.shape[2]
    query, key = (functional.normalize(x.float(), dim=-1) for x in (query, key))
    if decay.dim() < query.dim():
        log_decay = functional.logsigmoid(decay.float()).unsqueeze(-1)
    else:
        log_decay = _LOWEST_LOG_DECAY * decay.float().sigmoid()
    by_head = [x.transpose(1, 2) for x in (query * query.shape[-1] ** -0.5, key, value, log_decay)]
    return Tokens(
        query=by_head[0].repeat_interleave(group, 1),
        key=by_head[1].repeat_interleave(group, 1),
        value=by_head[2],
        log_decay=by_head[3],
        strength=strength.float().sigmoid().unsqueeze(-1).transpose(1, 2),
    )
