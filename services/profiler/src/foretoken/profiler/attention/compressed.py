"""The whole compressed attention block of DeepSeek-V4, of equal sequences.

A query sees the last tokens as they are, and entries that stand for blocks of tokens: all complete
ones, or those an indexer scores highest. New entries are made of blocks that lie within the new
tokens. Rotations by position and the sink of the softmax are left out.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

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


class CompressedBlock(NamedTuple):
    """One set of inputs: new tokens, caches by place, weights [in, out].

    `keys` [tokens, features] and `entries`, `index_entries` [entries, features] are those of all
    sequences; `compressor` gives features and how much they count of one or of two blocks.
    """

    hidden: torch.Tensor
    keys: torch.Tensor
    entries: torch.Tensor
    index_entries: torch.Tensor
    visible: torch.Tensor
    down: torch.Tensor
    query_norm: torch.Tensor
    query_up: torch.Tensor
    compressor: torch.Tensor
    index_query: torch.Tensor
    index_weight: torch.Tensor
    index_compressor: torch.Tensor
    into_groups: torch.Tensor
    out: torch.Tensor


def has_equal_sequences(dims: Mapping[str, int]) -> bool:
    """Return whether tokens can be shared out evenly: unequal lengths are not in the dimensions."""
    q_tokens = dims.get("q_tokens", dims["num_seqs"])
    return q_tokens % dims["num_seqs"] == 0 == dims["kv_tokens"] % dims["num_seqs"]


def equal_batch(dims: Mapping[str, int]) -> Batch:
    """Return the sequences: of one new token each without `q_tokens`."""
    count = dims["num_seqs"]
    q_len = dims.get("q_tokens", count) // count
    return Batch((q_len,) * count, (dims["kv_tokens"] // count,) * count)


def make_compressed_block(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    """Return random inputs for equal sequences."""
    batch, hidden, q_rank = equal_batch(dims), dims["hidden"], dims["q_lora_rank"]
    heads, features, groups = dims["num_heads"], dims["head_dim"], dims["o_groups"]
    index_heads = dims["index_num_heads"]
    index_dim = dims["index_head_dim"] if index_heads else 0
    num_entries = _entries_of(batch, dims) * batch.num_seqs
    # Features, and how much each of them counts; of two blocks where entries overlap.
    parts = 2 * (2 if index_heads else 1) if dims["compress_ratio"] else 0
    return CompressedBlock(
        hidden=tensors.random(sum(batch.q_lens), hidden),
        keys=tensors.random(sum(batch.kv_lens), features),
        entries=tensors.random(num_entries, features),
        index_entries=tensors.random(num_entries, index_dim),
        visible=count_visible(batch).to(tensors.device),
        down=tensors.random(hidden, q_rank + features),
        query_norm=tensors.random(q_rank),
        query_up=tensors.random(q_rank, heads * features),
        compressor=tensors.random(hidden, parts * features),
        index_query=tensors.random(q_rank, index_heads * index_dim),
        index_weight=tensors.random(hidden, index_heads),
        index_compressor=tensors.random(hidden, parts * index_dim),
        into_groups=tensors.random(groups, heads // groups * features, dims["o_lora_rank"]),
        out=tensors.random(groups * dims["o_lora_rank"], hidden),
    )


def bind_compressed_block(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    """Return the block from hidden state to hidden state."""
    batch, q_rank, heads = equal_batch(dims), dims["q_lora_rank"], dims["num_heads"]
    q_len = batch.lengths[0]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        block = CompressedBlock(*inputs)
        low, keys = (block.hidden @ block.down).split((q_rank, dims["head_dim"]), dim=-1)
        kept = block.keys.unflatten(0, (batch.num_seqs, -1))
        kept[:, kept.shape[1] - q_len :] = keys.unflatten(0, (batch.num_seqs, -1))
        low = functional.rms_norm(low, (q_rank,), block.query_norm)
        query = (low @ block.query_up).unflatten(-1, (heads, -1)) * dims["head_dim"] ** -0.5
        _make_entries(block.hidden @ block.compressor, block.entries, batch, dims)
        attended = _attend(block, query, _choice_of(block, low, batch, dims), batch, dims)
        grouped = attended.flatten(1).unflatten(-1, (dims["o_groups"], -1))
        by_group = torch.bmm(grouped.transpose(0, 1), block.into_groups).transpose(0, 1)
        return by_group.flatten(1) @ block.out

    return run


def _entries_of(batch: Batch, dims: Mapping[str, int]) -> int:
    """Return the complete entries of a sequence."""
    ratio = dims["compress_ratio"]
    return batch.lengths[1] // ratio if ratio else 0


def _make_entries(
    features: torch.Tensor, entries: torch.Tensor, batch: Batch, dims: Mapping[str, int]
) -> None:
    """Write the entries of blocks that lie within the new tokens."""
    ratio, (q_len, kv_len) = dims["compress_ratio"], batch.lengths
    if not ratio:
        return
    skipped = -(kv_len - q_len) % ratio
    num_blocks = max(q_len - skipped, 0) // ratio
    if not num_blocks:
        return
    tokens = features.unflatten(0, (batch.num_seqs, q_len))
    tokens = tokens[:, skipped : skipped + num_blocks * ratio].unflatten(1, (num_blocks, ratio))
    values, weights = tokens.unflatten(-1, (-1, entries.shape[-1])).chunk(2, dim=-2)
    # Where entries overlap, the first features of the block before count with a block's second.
    weights = _with_block_before(weights, float("-inf")).softmax(2)
    made = (weights * _with_block_before(values, 0.0)).sum(2)
    kept = entries.unflatten(0, (batch.num_seqs, -1))
    first = (kv_len - q_len + skipped) // ratio
    kept[:, first : first + num_blocks] = made


def _with_block_before(parts: torch.Tensor, missing: float) -> torch.Tensor:
    """Return [seqs, blocks, tokens, features] of a block and, of two parts, the one before it."""
    if parts.shape[-2] == 1:
        return parts.squeeze(-2)
    before = functional.pad(parts[:, :-1, :, 0], (0, 0, 0, 0, 1, 0), value=missing)
    return torch.cat((before, parts[..., 1, :]), dim=2)


def _choice_of(
    block: CompressedBlock, low: torch.Tensor, batch: Batch, dims: Mapping[str, int]
) -> Choice:
    ratio, num_entries = max(dims["compress_ratio"], 1), _entries_of(batch, dims)
    complete = split_queries(batch, block.visible // ratio)
    heads = dims["index_num_heads"]
    if not heads:
        places = torch.arange(num_entries, device=low.device)

        def take_all(group: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            is_seen = places < complete[group][rows]
            return places.expand(is_seen.shape), is_seen

        return take_all
    _make_entries(block.hidden @ block.index_compressor, block.index_entries, batch, dims)
    queries = split_queries(batch, (low @ block.index_query).unflatten(-1, (heads, -1)))
    weights = split_queries(batch, block.hidden @ block.index_weight)
    keys = split_contexts(_with_entries(batch, num_entries), block.index_entries)

    return choose_scored(queries, keys, weights, complete, dims["index_topk"])


def _with_entries(batch: Batch, num_entries: int) -> Batch:
    """Return the batch as its queries see entries."""
    return Batch(batch.q_lens, (num_entries,) * batch.num_seqs)


def _attend(
    block: CompressedBlock,
    query: torch.Tensor,
    choose: Choice,
    batch: Batch,
    dims: Mapping[str, int],
) -> torch.Tensor:
    """Return attention [tokens, heads, features] over the window and the chosen entries."""
    num_entries = _entries_of(batch, dims)
    contexts = split_contexts(batch, block.keys)
    entries = split_contexts(_with_entries(batch, num_entries), block.entries)
    visible = split_queries(batch, block.visible)
    back = torch.arange(dims["window"], device=query.device)
    gathered = dims["window"] + (dims["index_topk"] or num_entries)
    elements = gathered * dims["head_dim"] + num_entries * max(dims["index_num_heads"], 1)

    def attend(group: int, queries: torch.Tensor, rows: slice) -> torch.Tensor:
        places = visible[group][rows] - 1 - back
        chosen, is_seen = choose(group, rows)
        near = take_keys(contexts[group], places.clamp_min(0), rows)
        keys = torch.cat((near, take_keys(entries[group], chosen, rows)), dim=1)
        return attend_chosen(queries[rows], keys, keys, torch.cat((places >= 0, is_seen), dim=1))

    parts = enumerate(split_queries(batch, query))
    return torch.cat(
        [by_rows(len(part), elements, partial(attend, group, part)) for group, part in parts]
    )
