"""Latent attention of new tokens on unpacked keys and values, all sequences of equal length.

Keys come whole, as attention kernels take them: each head's has its copy of the shared part.
"""

from collections.abc import Mapping

import torch

from foretoken.profiler.attention import attend, causal_mask, split_evenly
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_seqs, num_heads = dims["num_seqs"], dims["num_heads"]
    nope, rope = dims["qk_nope_head_dim"], dims["qk_rope_head_dim"]
    q_len = split_evenly(dims["q_tokens"], num_seqs)
    kv_len = split_evenly(dims["kv_tokens"], num_seqs)
    key = tensors.random(num_seqs, num_heads, kv_len, nope)
    shared = tensors.random(num_seqs, 1, kv_len, rope).expand(-1, num_heads, -1, -1)
    return (
        tensors.random(num_seqs, num_heads, q_len, nope + rope),
        torch.cat((key, shared), dim=-1),
        tensors.random(num_seqs, num_heads, kv_len, dims["v_head_dim"]),
        causal_mask(q_len, kv_len, tensors.device),
    )


KERNEL = Kernel(
    operator="mla_prefill",
    source="torch.nn.functional.scaled_dot_product_attention",
    make_inputs=_make_inputs,
    bind=lambda _: attend,
    differentiable=(0, 1, 2),
)
