"""The whole latent attention block to pools of tokens, which attends in the latent space.

Heads have no part with positions. The indexer has a key for every complete pool: the sum of its
tokens' keys, weighted by feature with the softmax of their gates. A query sees the tokens of the
pools that score highest, and those of its own pool where that is not complete.
Source: GLM-5.3-Flash's modelling file in transformers 5 (`glm5_next`), 2026.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn import functional

from foretoken.domain.operators.spec.pooled_indexer import without_positions
from foretoken.profiler.attention.dsa import attend_selected
from foretoken.profiler.attention.latent import (
    LatentBlock,
    attend_absorbed,
    compress,
    expand_queries,
    make_block,
)
from foretoken.profiler.attention.ragged import Batch
from foretoken.profiler.attention.selected import (
    Choice,
    choose_scored,
    count_visible,
    split_contexts,
    split_queries,
)
from foretoken.profiler.kernel import Inputs, TensorFactory

_NORM_EPSILON = 1e-6
_BLOCK_LENGTH = len(LatentBlock._fields)


class PooledIndexer(NamedTuple):
    """The indexer's weights [in, out], its keys by pool, and the tokens of pools not complete yet.

    `key` gives a token's key and its gate; `offsets` [index_pool, features] are added to the gates
    of a pool. `open` [num_seqs * index_pool, 2 * features] are keys and gates by place in the last
    pool of a sequence. `members` [pools, index_pool] are the tokens of the pools that new tokens
    complete, as rows of `open` and, after them, of the new tokens; `completed` [pools] is where
    their keys go. `kept` [2, tokens] are the new tokens that stay in `open`, and where.
    """

    query: torch.Tensor
    key: torch.Tensor
    weight: torch.Tensor
    key_norm: torch.Tensor
    key_bias: torch.Tensor
    offsets: torch.Tensor
    pools: torch.Tensor
    open: torch.Tensor
    members: torch.Tensor
    completed: torch.Tensor
    kept: torch.Tensor
    visible: torch.Tensor


def make_pooled_block(dims: Mapping[str, int], batch: Batch, tensors: TensorFactory) -> Inputs:
    """Return random inputs of a block and its indexer."""
    heads, features, hidden = dims["index_num_heads"], dims["index_head_dim"], dims["hidden"]
    pool = dims["index_pool"]
    members, completed, kept = _places_of_new(batch, pool)
    indexer = PooledIndexer(
        query=tensors.random(dims["q_lora_rank"], heads * features),
        key=tensors.random(hidden, 2 * features),
        weight=tensors.random(hidden, heads),
        key_norm=tensors.random(features),
        key_bias=tensors.random(features),
        offsets=tensors.random(pool, features),
        pools=tensors.random(sum(kv_len // pool for kv_len in batch.kv_lens), features),
        open=tensors.random(batch.num_seqs * pool, 2 * features),
        members=members.to(tensors.device),
        completed=completed.to(tensors.device),
        kept=kept.to(tensors.device),
        visible=count_visible(batch).to(tensors.device),
    )
    return *make_block(without_positions(dims), batch, tensors), *indexer


def _places_of_new(batch: Batch, pool: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `members`, `completed` and `kept` of a batch."""
    members, completed, kept = [], [], []
    num_pools, num_new = 0, 0
    for index, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        cached = kv_len - q_len
        places = torch.arange(cached // pool * pool, kv_len)
        slots = index * pool + places % pool
        rows = torch.where(
            places < cached, slots, batch.num_seqs * pool + num_new + places - cached
        )
        count = kv_len // pool - cached // pool
        members.append(rows[: count * pool].view(count, pool))
        completed.append(torch.arange(cached // pool, kv_len // pool) + num_pools)
        is_kept = (places >= cached) & (places >= kv_len // pool * pool)
        kept.append(torch.stack((num_new + places - cached, slots))[:, is_kept])
        num_pools += kv_len // pool
        num_new += q_len
    return torch.cat(members), torch.cat(completed), torch.cat(kept, dim=1)


def bind_pooled_block(dims: Mapping[str, int], batch: Batch) -> Callable[..., torch.Tensor]:
    """Return the block from hidden state to hidden state."""
    num_heads = dims["num_heads"]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        block = LatentBlock(*inputs[:_BLOCK_LENGTH])
        indexer = PooledIndexer(*inputs[_BLOCK_LENGTH:])
        low = compress(block)
        queries = expand_queries(block, low, num_heads)
        _make_pools(block.hidden, indexer)
        choose = _choice_of(block.hidden, indexer, low, batch, dims)
        return attend_absorbed(
            block, queries, lambda query: attend_selected(query, block.cache, batch, choose, dims)
        )

    return run


def _make_pools(hidden: torch.Tensor, indexer: PooledIndexer) -> None:
    """Write the keys of pools that new tokens complete, and the tokens of those they do not."""
    key, gate = (hidden @ indexer.key).chunk(2, dim=-1)
    key = functional.layer_norm(
        key, key.shape[-1:], indexer.key_norm, indexer.key_bias, _NORM_EPSILON
    )
    new = torch.cat((key, gate), dim=-1)
    keys, gates = torch.cat((indexer.open, new))[indexer.members].chunk(2, dim=-1)
    weights = (gates + indexer.offsets).softmax(1)
    indexer.pools[indexer.completed] = (weights * keys).sum(1)
    indexer.open[indexer.kept[1]] = new[indexer.kept[0]]


def _choice_of(
    hidden: torch.Tensor,
    indexer: PooledIndexer,
    low: torch.Tensor,
    batch: Batch,
    dims: Mapping[str, int],
) -> Choice:
    """Return the tokens of chosen pools, and of the pool that is not complete."""
    pool, heads = dims["index_pool"], dims["index_num_heads"]
    queries = split_queries(batch, (low @ indexer.query).unflatten(-1, (heads, -1)))
    weights = split_queries(batch, hidden @ indexer.weight)
    visible = split_queries(batch, indexer.visible)
    complete = split_queries(batch, indexer.visible // pool)
    keys = split_contexts(batch, indexer.pools, pool)
    choose_pools = choose_scored(queries, keys, weights, complete, dims["index_topk"] // pool)
    within = torch.arange(pool, device=hidden.device)

    def choose(group: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        pools, is_seen = choose_pools(group, rows)
        tail = complete[group][rows] * pool + within[:-1]
        is_there = tail < visible[group][rows]
        places = (pools.unsqueeze(-1) * pool + within).flatten(1)
        chosen = torch.cat((places, tail.clamp_max(batch.kv_lens[group] - 1)), dim=1)
        return chosen, torch.cat((is_seen.repeat_interleave(pool, dim=1), is_there), dim=1)

    return choose
