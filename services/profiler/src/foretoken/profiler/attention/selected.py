"""Attention over the keys that an indexer selects for each query, with torch's own products.

No fused kernel of torch attends to a selection: keys are gathered, a few queries at a time.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from foretoken.profiler.attention.ragged import Batch

# Gathered keys and values of so many elements fit in addition to what is measured.
_GATHERED_MAX = 2**26


def is_one_group(batch: Batch) -> bool:
    """Return whether all sequences can run together: equal ones of one new token each."""
    return batch.is_equal and batch.lengths[0] == 1


def split_contexts(batch: Batch, cache: torch.Tensor, pool: int = 1) -> list[torch.Tensor]:
    """Return what groups of queries see: [keys, ...] of a sequence, or [sequences, keys, ...].

    `pool` tokens have a key together; those at the end that are fewer have none.
    """
    if is_one_group(batch):
        return [cache.unflatten(0, (batch.num_seqs, -1))]
    return list(cache.split([kv_len // pool for kv_len in batch.kv_lens]))


def split_queries(batch: Batch, query: torch.Tensor) -> list[torch.Tensor]:
    """Return the queries [queries, ...] of each of these groups."""
    return [query] if is_one_group(batch) else list(query.split(batch.q_lens))


def count_visible(batch: Batch) -> torch.Tensor:
    """Return how many keys each query sees that is in order: [queries, 1]."""
    every = [
        torch.arange(kv_len - q_len + 1, kv_len + 1)
        for q_len, kv_len in zip(batch.q_lens, batch.kv_lens, strict=True)
    ]
    return torch.cat(every).unsqueeze(1)


def score_keys(query: torch.Tensor, keys: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return the products [queries, heads, keys] of some queries [queries, heads, features].

    The keys are those of all queries, or those of each.
    """
    if keys.dim() == query.dim():
        return query[rows] @ keys[rows].transpose(-1, -2)
    return query[rows] @ keys.T


def take_keys(keys: torch.Tensor, chosen: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return the keys [queries, chosen, features] that some queries chose."""
    if keys.dim() == chosen.dim():
        return keys[chosen]
    own = keys[rows]
    return own[torch.arange(len(own), device=own.device).unsqueeze(1), chosen]


def choose_keys(
    scores: torch.Tensor, num_visible: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of the best of the first keys, and which of them there are.

    Scores are [queries, keys], `num_visible` [queries, 1].
    """
    num_keys = scores.shape[-1]
    is_hidden = torch.arange(num_keys, device=scores.device) >= num_visible
    best = scores.masked_fill(is_hidden, float("-inf")).topk(min(limit, num_keys), dim=-1)
    return best.indices, best.values > float("-inf")


# (group of queries, some of its queries) -> the places they see, and which of these there are
Choice = Callable[[int, slice], tuple[torch.Tensor, torch.Tensor]]


def choose_scored(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    visible: Sequence[torch.Tensor],
    limit: int,
) -> Choice:
    """Return the choice of an indexer, by the sum over its heads of weight times relu(query key).

    All are by group: queries [queries, heads, features], weights [queries, heads], and how many of
    the keys each query sees.
    """

    def choose(group: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        products = score_keys(queries[group], keys[group], rows).relu()
        scores = (products * weights[group][rows].unsqueeze(-1)).sum(1)
        return choose_keys(scores, visible[group][rows], limit)

    return choose


def attend_chosen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_seen: torch.Tensor
) -> torch.Tensor:
    """Return attention of scaled queries [..., heads, features] over keys [..., chosen, features].

    `is_seen` is [..., chosen].
    """
    scores = query @ key.transpose(-1, -2)
    scores = scores.masked_fill(~is_seen.unsqueeze(-2), float("-inf"))
    return scores.softmax(-1) @ value


def by_rows(
    num_rows: int, row_elements: int, attend: Callable[[slice], torch.Tensor]
) -> torch.Tensor:
    """Return what `attend` gives for all rows, asked for as many at once as fit."""
    return torch.cat([attend(rows) for rows in _slices(num_rows, row_elements)])


def _slices(num_rows: int, row_elements: int) -> Iterator[slice]:
    step = max(_GATHERED_MAX // row_elements, 1)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
