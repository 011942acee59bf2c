"""Latent attention of one new token per sequence on the cache, all contexts of equal length.

Queries come scaled: the widths that say by how much are those of the unpacked heads.
"""

from collections.abc import Callable, Mapping

import torch

from foretoken.profiler.attention import split_evenly
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory
from foretoken.profiler.latent_attention import attend_latents


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_seqs = dims["num_seqs"]
    kv_len = split_evenly(dims["kv_tokens"], num_seqs)
    width = dims["kv_lora_rank"] + dims["qk_rope_head_dim"]
    return (
        tensors.random(num_seqs, dims["num_heads"], width),
        tensors.random(num_seqs, kv_len, width),
    )


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    rank = dims["kv_lora_rank"]

    def run(query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return attend_latents(query, cache, rank)

    return run


KERNEL = Kernel(
    operator="mla_decode",
    source="torch.bmm and torch.softmax",
    make_inputs=_make_inputs,
    bind=_bind,
)
