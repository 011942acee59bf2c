"""The whole block-sparse attention block (MSA): an indexer's best blocks for each head of keys.

A head of the indexer goes with each key and value head, all with one key a token; a block counts as
its best token, the last one is always seen. Norms of heads and the rotation by position are left
out: they take no part of the time of the products.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn import functional

from foretoken.profiler.attention.ragged import Batch
from foretoken.profiler.attention.selected import (
    attend_chosen,
    by_rows,
    count_visible,
    score_keys,
    split_contexts,
    split_queries,
)
from foretoken.profiler.kernel import Inputs, TensorFactory


class MsaBlock(NamedTuple):
    """One set of inputs: new tokens, caches by place, weights [in, out].

    `places` [num_tokens] are those of the new tokens in the caches [places, ...]; `visible`
    [num_tokens, 1] counts the keys that each of them sees.
    """

    hidden: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    index_keys: torch.Tensor
    places: torch.Tensor
    visible: torch.Tensor
    inward: torch.Tensor
    out: torch.Tensor


def make_msa_block(dims: Mapping[str, int], batch: Batch, tensors: TensorFactory) -> Inputs:
    """Return random inputs for the sequences of a batch."""
    hidden, num_places = dims["hidden"], sum(batch.kv_lens)
    ends = torch.tensor(batch.kv_lens).cumsum(0).tolist()
    places = [torch.arange(end - q, end) for end, q in zip(ends, batch.q_lens, strict=True)]
    return MsaBlock(
        hidden=tensors.random(sum(batch.q_lens), hidden),
        keys=tensors.random(num_places, dims["num_kv_heads"], dims["head_dim"]),
        values=tensors.random(num_places, dims["num_kv_heads"], dims["head_dim"]),
        index_keys=tensors.random(num_places, dims["index_head_dim"]),
        places=torch.cat(places).to(tensors.device),
        visible=count_visible(batch).to(tensors.device),
        inward=tensors.random(hidden, sum(_widths(dims))),
        out=tensors.random(dims["num_heads"] * dims["head_dim"], hidden),
    )


def bind_msa_block(dims: Mapping[str, int], batch: Batch) -> Callable[..., torch.Tensor]:
    """Return the block from hidden state to hidden state."""
    kv_heads, index_heads = dims["num_kv_heads"], dims["index_num_heads"]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        block = MsaBlock(*inputs)
        parts = (block.hidden @ block.inward).split(_widths(dims), dim=-1)
        query, index_query = (
            part.unflatten(-1, (heads, -1))
            for part, heads in zip(parts[:2], (dims["num_heads"], index_heads), strict=True)
        )
        block.keys[block.places] = parts[2].unflatten(-1, (kv_heads, -1))
        block.values[block.places] = parts[3].unflatten(-1, (kv_heads, -1))
        block.index_keys[block.places] = parts[4]
        groups = zip(
            split_queries(batch, query * dims["head_dim"] ** -0.5),
            split_queries(batch, index_query),
            split_queries(batch, block.visible),
            *(split_contexts(batch, kept) for kept in (block.index_keys, block.keys, block.values)),
            strict=True,
        )
        attended = torch.cat([_attend_group(group, dims) for group in groups])
        return attended.flatten(1) @ block.out

    return run


def _widths(dims: Mapping[str, int]) -> list[int]:
    """Return the features of queries, the indexer's queries, keys, values, the indexer's key."""
    keys = dims["num_kv_heads"] * dims["head_dim"]
    index_dim = dims["index_head_dim"]
    queries = dims["num_heads"] * dims["head_dim"]
    return [queries, dims["index_num_heads"] * index_dim, keys, keys, index_dim]


def _attend_group(group: tuple[torch.Tensor, ...], dims: Mapping[str, int]) -> torch.Tensor:
    """Return the attention [queries, heads, features] of queries that see one group of keys."""
    query, index_query, visible, index_keys, keys, values = group
    num_keys = index_keys.shape[-2]
    limit = min(dims["topk_blocks"] * dims["block_size"], num_keys + dims["block_size"])
    elements = 2 * limit * dims["num_kv_heads"] * dims["head_dim"]

    def attend(rows: slice) -> torch.Tensor:
        scores = score_keys(index_query, index_keys, rows)
        chosen, is_seen = _choose_tokens(scores, visible[rows], dims)
        # [queries, key heads, chosen, features] of each key head's own choice.
        heads = torch.arange(dims["num_kv_heads"], device=keys.device).view(1, -1, 1)
        if keys.dim() == query.dim():
            own = [kept[chosen, heads] for kept in (keys, values)]
        else:
            places = torch.arange(len(query), device=keys.device)[rows].view(-1, 1, 1)
            own = [kept[places, chosen, heads] for kept in (keys, values)]
        by_key_head = query[rows].unflatten(1, (dims["num_kv_heads"], -1))
        return attend_chosen(by_key_head, own[0], own[1], is_seen).flatten(1, 2)

    return by_rows(len(query), elements + num_keys * dims["index_num_heads"], attend)


def _choose_tokens(
    scores: torch.Tensor, visible: torch.Tensor, dims: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [queries, key heads, chosen] of the best blocks, and which there are.

    `scores` are [queries, heads of the indexer, keys]; key heads share them in turn.
    """
    size, num_keys = dims["block_size"], scores.shape[-1]
    limit = visible.unsqueeze(1)
    is_hidden = torch.arange(num_keys, device=scores.device) >= limit
    scores = scores.masked_fill(is_hidden, float("-inf"))
    scores = functional.pad(scores, (0, -num_keys % size), value=float("-inf"))
    blocks = scores.unflatten(-1, (-1, size)).amax(-1)
    last = ((limit - 1) // size).expand(-1, blocks.shape[1], -1)
    blocks = blocks.scatter(-1, last, float("inf"))
    heads = torch.arange(dims["num_kv_heads"], device=scores.device) % blocks.shape[1]
    best = blocks[:, heads].topk(min(dims["topk_blocks"], blocks.shape[-1]), dim=-1)
    inside = torch.arange(size, device=scores.device)
    tokens = (best.indices.unsqueeze(-1) * size + inside).flatten(-2)
    is_seen = (tokens < limit) & (best.values > float("-inf")).repeat_interleave(size, -1)
    return tokens.clamp_max(num_keys - 1), is_seen
