"""Inputs of attention on a cache in pages, in a random order as in a server after a while."""

import random
from collections.abc import Sequence

import torch

from foretoken.profiler.attention.batch import AttentionCase, starts_of
from foretoken.profiler.attention.ragged import Batch
from foretoken.profiler.kernel import Inputs, TensorFactory

# Tokens of a page: vLLM's default, which flash-attn 3 and FlashInfer take as well.
PAGE_SIZE = 16
FP8 = torch.float8_e4m3fn
# The variant of calls on a cache in that format.
FP8_CACHE = "kv=fp8"


def num_pages_of(batch: Batch, page_size: int) -> list[int]:
    """Return how many pages each sequence's context fills."""
    return [-(-kv_len // page_size) for kv_len in batch.kv_lens]


def shuffled_pages(num_pages: int) -> list[int]:
    """Return page numbers in a random order, always the same one."""
    pages = list(range(num_pages))
    random.Random(num_pages).shuffle(pages)  # noqa: S311 - an order of pages, not a secret
    return pages


def _pages(
    case: AttentionCase, page_size: int, tensors: TensorFactory, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [pages, page_size, heads, features]."""
    num_pages = sum(num_pages_of(case.joined, page_size))
    shape = (num_pages, page_size, case.num_kv_heads)
    return (
        tensors.random(*shape, case.key_dim, dtype=dtype),
        tensors.random(*shape, case.value_dim, dtype=dtype),
    )


def _queries(
    case: AttentionCase, tensors: TensorFactory, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return tensors.random(sum(case.joined.q_lens), case.num_heads, case.key_dim, dtype=dtype)


def table_inputs(
    case: AttentionCase, page_size: int, tensors: TensorFactory, dtypes: Sequence[torch.dtype]
) -> Inputs:
    """Return queries, keys, values and tables of pages as flash-attn takes them.

    `dtypes` are those of queries and cache, the factory's own if empty. After keys and values come
    pages [seqs, longest], lengths of contexts [seqs] and where queries begin [seqs + 1], int32.
    """
    batch, device = case.joined, tensors.device
    q_dtype, kv_dtype = dtypes or (None, None)
    counts = num_pages_of(batch, page_size)
    pages = iter(shuffled_pages(sum(counts)))
    table = torch.zeros(batch.num_seqs, max(counts), dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor([next(pages) for _ in range(count)], dtype=torch.int32)
    return (
        _queries(case, tensors, q_dtype),
        *_pages(case, page_size, tensors, kv_dtype),
        table.to(device),
        torch.tensor(batch.kv_lens, dtype=torch.int32, device=device),
        starts_of(batch.q_lens, device),
    )


def list_inputs(
    case: AttentionCase, page_size: int, tensors: TensorFactory, kv_dtype: torch.dtype | None
) -> Inputs:
    """Return queries, keys, values and lists of pages as FlashInfer takes them.

    After keys and values come where each sequence's pages begin in the list [seqs + 1], the list
    [pages], tokens in each last page [seqs] and where queries begin [seqs + 1], int32.
    """
    batch, device = case.joined, tensors.device
    counts = num_pages_of(batch, page_size)
    last = [
        kv_len - (count - 1) * page_size
        for kv_len, count in zip(batch.kv_lens, counts, strict=True)
    ]
    return (
        _queries(case, tensors),
        *_pages(case, page_size, tensors, kv_dtype),
        starts_of(counts, device),
        torch.tensor(shuffled_pages(sum(counts)), dtype=torch.int32, device=device),
        torch.tensor(last, dtype=torch.int32, device=device),
        starts_of(batch.q_lens, device),
    )
