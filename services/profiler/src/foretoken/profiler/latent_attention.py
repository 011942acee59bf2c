"""What the kernels of multi-head latent attention share.

Source: DeepSeek-V2, section 2.1, 2024.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.nn import functional

from foretoken.profiler.attention import causal_mask
from foretoken.profiler.kernel import TensorFactory
from foretoken.profiler.kernels.rope import rotate_halves


class LatentBlock(NamedTuple):
    """One set of inputs of a whole attention block.

    `hidden` [num_seqs, q_len, hidden] are the new tokens, the last of their context. `cache`
    [num_seqs, kv_len, kv_lora_rank + qk_rope_head_dim] has a place for each. `cos` and `sin`
    [q_len, qk_rope_head_dim] are their positions. The other tensors are weights, those of
    matrices [in, out]; `mask` is empty where none is needed.
    """

    hidden: torch.Tensor
    cache: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    down: torch.Tensor
    query_norm: torch.Tensor
    latent_norm: torch.Tensor
    query_up: torch.Tensor
    latent_up: torch.Tensor
    out: torch.Tensor
    mask: torch.Tensor


def make_block(
    dims: Mapping[str, int], lengths: tuple[int, int], tensors: TensorFactory
) -> LatentBlock:
    """Return random inputs; `lengths` are those of queries and keys."""
    q_len, kv_len = lengths
    q_rank, rank, rope = (
        dims[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
    )
    num_seqs, hidden, num_heads = dims["num_seqs"], dims["hidden"], dims["num_heads"]
    nope, value = dims["qk_nope_head_dim"], dims["v_head_dim"]
    return LatentBlock(
        hidden=tensors.random(num_seqs, q_len, hidden),
        cache=tensors.random(num_seqs, kv_len, rank + rope),
        cos=tensors.random(q_len, rope),
        sin=tensors.random(q_len, rope),
        down=tensors.random(hidden, q_rank + rank + rope),
        query_norm=tensors.random(q_rank),
        latent_norm=tensors.random(rank),
        query_up=tensors.random(q_rank, num_heads * (nope + rope)),
        latent_up=tensors.random(rank, num_heads * (nope + value)),
        out=tensors.random(num_heads * value, hidden),
        mask=causal_mask(q_len, kv_len, tensors.device),
    )


def project(block: LatentBlock, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries' parts without and with position; write the new tokens to the cache.

    Both parts are [num_seqs, q_len, num_heads, ...].
    """
    q_rank, rank, rope = len(block.query_norm), len(block.latent_norm), block.cos.shape[-1]
    low, latents, key_rope = (block.hidden @ block.down).split((q_rank, rank, rope), dim=-1)
    new = block.cache[:, -block.hidden.shape[1] :]
    new[..., :rank] = functional.rms_norm(latents, (rank,), block.latent_norm)
    new[..., rank:] = rotate_halves(key_rope, block.cos, block.sin)
    query = functional.rms_norm(low, (q_rank,), block.query_norm) @ block.query_up
    query = query.unflatten(-1, (num_heads, -1))
    query_nope, query_rope = query[..., :-rope], query[..., -rope:]
    return query_nope, rotate_halves(query_rope, block.cos.unsqueeze(1), block.sin.unsqueeze(1))


def attend_latents(query: torch.Tensor, cache: torch.Tensor, rank: int) -> torch.Tensor:
    """Return softmax(qC^T)C of scaled queries, the values being the first `rank` features of C.

    Queries are [num_seqs, num_heads, features], the cache [num_seqs, kv_len, features]. Two
    products, as fused kernels of torch do not split a context of few sequences over the device,
    and take no head this wide, or only slowly.
    """
    scores = torch.bmm(query, cache.transpose(1, 2))
    return torch.bmm(scores.softmax(-1), cache[..., :rank])
