"""What the kernels of multi-head latent attention share.

Source: DeepSeek-V2, section 2.1, 2024.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn import functional

from foretoken.profiler.attention.batch import corner_mask
from foretoken.profiler.attention.ragged import Batch
from foretoken.profiler.attention.sdpa import attend
from foretoken.profiler.kernel import TensorFactory
from foretoken.profiler.kernels.rope import rotate_halves


class LatentBlock(NamedTuple):
    """One set of inputs of a whole attention block.

    `hidden` [num_tokens, hidden] are the new tokens, sequence by sequence, the last of their
    context. `cache` [num_places, kv_lora_rank + qk_rope_head_dim] has a place for each token of a
    context; `places` [num_tokens] are those of the new tokens. `cos` and `sin`
    [num_tokens, qk_rope_head_dim] are their positions. The other tensors are weights, those of
    matrices [in, out]; `mask` is empty where none is needed.
    """

    hidden: torch.Tensor
    cache: torch.Tensor
    places: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    down: torch.Tensor
    query_norm: torch.Tensor
    latent_norm: torch.Tensor
    query_up: torch.Tensor
    latent_up: torch.Tensor
    out: torch.Tensor
    mask: torch.Tensor


def make_block(dims: Mapping[str, int], batch: Batch, tensors: TensorFactory) -> LatentBlock:
    """Return random inputs for the sequences of a batch."""
    q_rank, rank, rope = (
        dims[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
    )
    hidden, num_heads = dims["hidden"], dims["num_heads"]
    nope, value = dims["qk_nope_head_dim"], dims["v_head_dim"]
    num_tokens = sum(batch.q_lens)
    return LatentBlock(
        hidden=tensors.random(num_tokens, hidden),
        cache=tensors.random(sum(batch.kv_lens), rank + rope),
        places=_new_places(batch).to(tensors.device),
        cos=tensors.random(num_tokens, rope),
        sin=tensors.random(num_tokens, rope),
        down=tensors.random(hidden, q_rank + rank + rope),
        query_norm=tensors.random(q_rank),
        latent_norm=tensors.random(rank),
        query_up=tensors.random(q_rank, num_heads * (nope + rope)),
        latent_up=tensors.random(rank, num_heads * (nope + value)),
        out=tensors.random(num_heads * value, hidden),
        mask=corner_mask(batch, tensors.device),
    )


def _new_places(batch: Batch) -> torch.Tensor:
    """Return the places of new tokens: the last of every sequence's."""
    ends = torch.tensor(batch.kv_lens).cumsum(0).tolist()
    lasts = zip(ends, batch.q_lens, strict=True)
    return torch.cat([torch.arange(end - q_len, end) for end, q_len in lasts])


def project(block: LatentBlock, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries' parts without and with position; write the new tokens to the cache.

    Both parts are [num_tokens, num_heads, ...].
    """
    return expand_queries(block, compress(block), num_heads)


def compress(block: LatentBlock) -> torch.Tensor:
    """Return the compressed queries [num_tokens, q_rank]; write the new tokens to the cache."""
    q_rank, rank, rope = len(block.query_norm), len(block.latent_norm), block.cos.shape[-1]
    low, latents, key_rope = (block.hidden @ block.down).split((q_rank, rank, rope), dim=-1)
    normed = functional.rms_norm(latents, (rank,), block.latent_norm)
    turned = rotate_halves(key_rope, block.cos, block.sin)
    block.cache[block.places] = torch.cat((normed, turned), dim=-1)
    return functional.rms_norm(low, (q_rank,), block.query_norm)


def expand_queries(
    block: LatentBlock, low: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of the heads' queries without and with position."""
    query = (low @ block.query_up).unflatten(-1, (num_heads, -1))
    rope = block.cos.shape[-1]
    query_nope, query_rope = query.split((query.shape[-1] - rope, rope), dim=-1)
    return query_nope, rotate_halves(query_rope, block.cos.unsqueeze(1), block.sin.unsqueeze(1))


def attend_absorbed(
    block: LatentBlock,
    queries: tuple[torch.Tensor, torch.Tensor],
    attend_to_cache: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the block's output for queries' parts, which attend in the latent space.

    The weights that would unpack the cache take the queries there and the values back.
    """
    query_nope, query_rope = queries
    num_heads, nope = query_nope.shape[-2:]
    # [rank, num_heads, nope + value] as one matrix per head, without a copy.
    up = block.latent_up.unflatten(-1, (num_heads, -1)).transpose(0, 1)
    query = torch.bmm(query_nope.transpose(0, 1), up[..., :nope].transpose(1, 2))
    scale = (nope + query_rope.shape[-1]) ** -0.5
    query = torch.cat((query.transpose(0, 1), query_rope), dim=-1) * scale
    values = torch.bmm(attend_to_cache(query).transpose(0, 1), up[..., nope:])
    return values.transpose(0, 1).flatten(1) @ block.out


def attend_unpacked(
    batch: Batch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return causal attention [num_tokens, num_heads, features] of sequences in one row of tokens.

    Equal sequences run together, others one after the other.
    """
    if batch.is_equal:
        queries, keys, values = (
            vectors.unflatten(0, (batch.num_seqs, -1)).transpose(1, 2)
            for vectors in (query, key, value)
        )
        return attend(queries, keys, values, mask).transpose(1, 2).flatten(0, 1)
    attended = []
    parts = zip(
        query.split(batch.q_lens), key.split(batch.kv_lens), value.split(batch.kv_lens), strict=True
    )
    for part in parts:
        heads = [vectors.transpose(0, 1).unsqueeze(0) for vectors in part]
        q_len, kv_len = heads[0].shape[2], heads[1].shape[2]
        seen = mask[:0] if q_len in (1, kv_len) else mask[-q_len:, -kv_len:]
        attended.append(attend(heads[0], heads[1], heads[2], seen).squeeze(0).transpose(0, 1))
    return torch.cat(attended)


def attend_latents(
    query: torch.Tensor, cache: torch.Tensor, rank: int, batch: Batch
) -> torch.Tensor:
    """Return softmax(qC^T)C of scaled queries, the values being the first `rank` features of C.

    Queries are [num_seqs, num_heads, features], the cache [tokens of all sequences, features]. Two
    products, as fused kernels of torch do not split a context of few sequences over the device,
    and take no head this wide, or only slowly. Equal sequences run together, others one after the
    other.
    """
    if batch.is_equal:
        contexts = cache.unflatten(0, (batch.num_seqs, -1))
        scores = torch.bmm(query, contexts.transpose(1, 2))
        return torch.bmm(scores.softmax(-1), contexts[..., :rank])
    attended = query.new_empty(*query.shape[:2], rank)
    contexts = cache.split(batch.kv_lens)
    for out, vectors, context in zip(attended, query, contexts, strict=True):
        scores = torch.mm(vectors, context.T)
        torch.mm(scores.softmax(-1), context[:, :rank], out=out)
    return attended


def attend_padded_latents(
    query: torch.Tensor, cache: torch.Tensor, bias: torch.Tensor, rank: int
) -> torch.Tensor:
    """Return the same on a padded cache [num_seqs, longest, features].

    `bias` [num_seqs, 1, longest] is added to the scores: minus infinity where nothing is.
    """
    scores = torch.baddbmm(bias, query, cache.transpose(1, 2))
    return torch.bmm(scores.softmax(-1), cache[..., :rank])


def padding_bias(batch: Batch, tensors: TensorFactory) -> torch.Tensor:
    """Return what hides the end of every sequence but the longest: [num_seqs, 1, longest]."""
    lengths = torch.tensor(batch.kv_lens, device=tensors.device)[:, None, None]
    is_missing = torch.arange(max(batch.kv_lens), device=tensors.device) >= lengths
    bias = torch.zeros(is_missing.shape, dtype=tensors.dtype, device=tensors.device)
    return bias.masked_fill_(is_missing, float("-inf"))
