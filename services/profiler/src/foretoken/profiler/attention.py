"""What the attention kernels share: inputs, masks and the call into torch."""

from collections.abc import Mapping

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from foretoken.domain.errors import InvalidRequestError
from foretoken.profiler.kernel import Inputs, TensorFactory


def split_evenly(total: int, num_parts: int) -> int:
    """Return the size of equal parts.

    Raises:
        InvalidRequestError: the parts cannot be equal; torch's kernel takes no ragged batch.

    """
    if total % num_parts:
        raise InvalidRequestError(f"ragged batch: {total} tokens over {num_parts} sequences")
    return total // num_parts


def attention_inputs(
    dims: Mapping[str, int], num_seqs: int, lengths: tuple[int, int], tensors: TensorFactory
) -> Inputs:
    """Return queries, keys, values [batch, heads, length, head_dim] and a mask.

    `lengths` are those of queries and keys. The mask is empty where none is needed.
    """
    q_len, kv_len = lengths
    key_shape = (num_seqs, dims["num_kv_heads"], kv_len, dims["head_dim"])
    query = tensors.random(num_seqs, dims["num_heads"], q_len, dims["head_dim"])
    key, value = tensors.random(*key_shape), tensors.random(*key_shape)
    return query, key, value, causal_mask(q_len, kv_len, tensors.device)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return causal attention; queries are the last positions of their context."""
    is_grouped = query.shape[1] != key.shape[1]
    if mask.numel():
        # On CUDA a plain mask would rule the flash kernel out.
        bias = causal_lower_right(*mask.shape) if mask.is_cuda else mask
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, enable_gqa=is_grouped
        )
    is_causal = query.shape[2] > 1
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=is_grouped
    )


def causal_mask(q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """Return which keys each query sees; empty where torch's own causal flag says it."""
    if q_len in (1, kv_len):
        return torch.empty(0, dtype=torch.bool, device=device)
    allowed = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    return allowed.tril(diagonal=kv_len - q_len)
