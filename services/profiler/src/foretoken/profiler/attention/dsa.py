"""The whole sparse latent attention block (DSA), which attends in the latent space.

Of the context a query sees the tokens that the indexer scores highest: by the sum over its heads of
weight times relu(query key). Its rotation of a few features by position is left out. An indexer
without heads is another layer's: its choice is an input.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

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
    attend_chosen,
    by_rows,
    choose_scored,
    count_visible,
    split_contexts,
    split_queries,
    take_keys,
)
from foretoken.profiler.kernel import Inputs, TensorFactory

_BLOCK_LENGTH = len(LatentBlock._fields)


class Indexer(NamedTuple):
    """The indexer's weights [in, out], its keys by place, and for each query what it may see.

    `visible` [num_tokens, 1] counts keys; `chosen` [num_tokens, keys] is another layer's choice.
    """

    query: torch.Tensor
    key: torch.Tensor
    weight: torch.Tensor
    cache: torch.Tensor
    visible: torch.Tensor
    chosen: torch.Tensor


def make_dsa_block(dims: Mapping[str, int], batch: Batch, tensors: TensorFactory) -> Inputs:
    """Return random inputs of a block and its indexer."""
    heads, hidden = dims["index_num_heads"], dims["hidden"]
    features = dims["index_head_dim"] if heads else 0
    visible = count_visible(batch).to(tensors.device)
    width = 0 if heads else min(dims["index_topk"], max(batch.kv_lens))
    indexer = Indexer(
        query=tensors.random(dims["q_lora_rank"], heads * features),
        key=tensors.random(hidden, features),
        weight=tensors.random(hidden, heads),
        cache=tensors.random(sum(batch.kv_lens), features),
        visible=visible,
        chosen=tensors.integers(2**31, len(visible), width) % visible,
    )
    return *make_block(dims, batch, tensors), *indexer


def bind_dsa_block(dims: Mapping[str, int], batch: Batch) -> Callable[..., torch.Tensor]:
    """Return the block from hidden state to hidden state."""
    num_heads = dims["num_heads"]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        block, indexer = LatentBlock(*inputs[:_BLOCK_LENGTH]), Indexer(*inputs[_BLOCK_LENGTH:])
        low = compress(block)
        queries = expand_queries(block, low, num_heads)
        choose = _choice_of(block, indexer, low, batch, dims)
        return attend_absorbed(
            block, queries, lambda query: attend_selected(query, block.cache, batch, choose, dims)
        )

    return run


def _choice_of(
    block: LatentBlock,
    indexer: Indexer,
    low: torch.Tensor,
    batch: Batch,
    dims: Mapping[str, int],
) -> Choice:
    heads, limit = dims["index_num_heads"], dims["index_topk"]
    if not heads:
        chosen_by_group = split_queries(batch, indexer.chosen)

        def repeat(group: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            chosen = chosen_by_group[group][rows]
            return chosen, torch.ones_like(chosen, dtype=torch.bool)

        return repeat
    indexer.cache[block.places] = block.hidden @ indexer.key
    queries = split_queries(batch, (low @ indexer.query).unflatten(-1, (heads, -1)))
    weights = split_queries(batch, block.hidden @ indexer.weight)
    visible = split_queries(batch, indexer.visible)
    keys = split_contexts(batch, indexer.cache)

    return choose_scored(queries, keys, weights, visible, limit)


def attend_selected(
    query: torch.Tensor, cache: torch.Tensor, batch: Batch, choose: Choice, dims: Mapping[str, int]
) -> torch.Tensor:
    """Return the attention [tokens, heads, rank] of queries in the latent space.

    Scored are keys, or pools of them of which the last need not be complete.
    """
    rank, pool, groups = dims["kv_lora_rank"], dims.get("index_pool", 1), []
    pairs = zip(split_queries(batch, query), split_contexts(batch, cache), strict=True)
    for group, (queries, context) in enumerate(pairs):
        num_keys, features = context.shape[-2:]
        gathered = (min(dims["index_topk"], num_keys) + pool - 1) * features
        scored = num_keys // pool * max(dims["index_num_heads"], 1)

        def attend(
            rows: slice,
            group: int = group,
            queries: torch.Tensor = queries,
            context: torch.Tensor = context,
        ) -> torch.Tensor:
            chosen, is_seen = choose(group, rows)
            latents = take_keys(context, chosen, rows)
            return attend_chosen(queries[rows], latents, latents[..., :rank], is_seen)

        groups.append(by_rows(len(queries), gathered + scored, attend))
    return torch.cat(groups)
