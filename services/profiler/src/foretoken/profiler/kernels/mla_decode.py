"""Latent attention of one new token per sequence on the cache, contexts equally long or not.

Queries come scaled: the widths that say by how much are those of the unpacked heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from foretoken.profiler.attention.batch import (
    HALF_DTYPES,
    is_ragged_decode,
    num_pages_of,
    read_decode_batch,
    shuffled_pages,
    starts_of,
)
from foretoken.profiler.attention.flashinfer import workspace
from foretoken.profiler.attention.latent import (
    attend_latents,
    attend_padded_latents,
    padding_bias,
)
from foretoken.profiler.attention.sdpa import is_cpu
from foretoken.profiler.kernel import (
    Inputs,
    Kernel,
    TensorFactory,
    has_capability,
    has_library,
    is_cuda,
    library,
)

_OPERATOR = "mla_decode"
_PAGE_SIZE = 64
# The widths FlashInfer has a kernel for, those of DeepSeek-V2 and V3.
_FLASHINFER_WIDTHS = (512, 64)


def _query(dims: Mapping[str, int], tensors: TensorFactory) -> torch.Tensor:
    return tensors.random(dims["num_seqs"], dims["num_heads"], _width(dims))


def _width(dims: Mapping[str, int]) -> int:
    return dims["kv_lora_rank"] + dims["qk_rope_head_dim"]


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_tokens = sum(read_decode_batch(dims).kv_lens)
    return _query(dims, tensors), tensors.random(num_tokens, _width(dims))


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    batch, rank = read_decode_batch(dims), dims["kv_lora_rank"]
    return lambda query, cache: attend_latents(query, cache, rank, batch)


def _make_padded(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    batch = read_decode_batch(dims)
    cache = tensors.random(batch.num_seqs, max(batch.kv_lens), _width(dims))
    return _query(dims, tensors), cache, padding_bias(batch, tensors)


def _bind_padded(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    rank = dims["kv_lora_rank"]
    return lambda query, cache, bias: attend_padded_latents(query, cache, bias, rank)


def _make_paged(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    """Return queries and pages in two parts each, as FlashInfer takes them, and the pages' places.

    These are where each sequence's begin [seqs + 1], a list of pages, and lengths [seqs], int32.
    """
    batch = read_decode_batch(dims)
    rank, rope = dims["kv_lora_rank"], dims["qk_rope_head_dim"]
    counts = num_pages_of(batch, _PAGE_SIZE)
    num_pages = sum(counts)
    return (
        tensors.random(batch.num_seqs, dims["num_heads"], rank),
        tensors.random(batch.num_seqs, dims["num_heads"], rope),
        tensors.random(num_pages, _PAGE_SIZE, rank),
        tensors.random(num_pages, _PAGE_SIZE, rope),
        starts_of(counts, tensors.device),
        torch.tensor(shuffled_pages(num_pages), dtype=torch.int32, device=tensors.device),
        torch.tensor(batch.kv_lens, dtype=torch.int32, device=tensors.device),
    )


def _bind_paged(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    made: list[Any] = []

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        # On the host and once, as a server plans once per step: all sets have the same pages.
        if not made:
            made.append(_plan(dims, inputs))
        attended: torch.Tensor = made[0].run(*inputs[:4], return_lse=False)
        return attended

    return run


def _plan(dims: Mapping[str, int], inputs: Inputs) -> Any:
    query, _, cache, _, starts, pages, lengths = inputs
    wrapper = library("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace(query.device))
    wrapper.plan(
        starts_of((1,) * dims["num_seqs"], query.device),
        starts,
        pages,
        lengths,
        dims["num_heads"],
        dims["kv_lora_rank"],
        dims["qk_rope_head_dim"],
        _PAGE_SIZE,
        # Not causal: one query sees all.
        False,
        1.0,
        query.dtype,
        cache.dtype,
    )
    return wrapper


def _takes_widths(dims: Mapping[str, int]) -> bool:
    return (dims["kv_lora_rank"], dims["qk_rope_head_dim"]) == _FLASHINFER_WIDTHS


_FLASHINFER = Kernel(
    operator=_OPERATOR,
    source="flashinfer.mla.BatchMLAPagedAttentionWrapper, paged",
    make_inputs=_make_paged,
    bind=_bind_paged,
    dtypes=HALF_DTYPES,
    is_present=lambda device: has_capability(8)(device) and has_library("flashinfer")(device),
    can_run=_takes_widths,
)
_EQUAL = Kernel(
    operator=_OPERATOR,
    source="torch.bmm and torch.softmax",
    make_inputs=_make_inputs,
    bind=_bind,
    can_run=lambda dims: not is_ragged_decode(dims),
)
_PER_SEQUENCE = Kernel(
    operator=_OPERATOR,
    source="torch.mm and torch.softmax, per sequence",
    make_inputs=_make_inputs,
    bind=_bind,
    can_run=is_ragged_decode,
)
_PADDED = Kernel(
    operator=_OPERATOR,
    source="torch.bmm and torch.softmax, padded",
    make_inputs=_make_padded,
    bind=_bind_padded,
    can_run=is_ragged_decode,
)
_PLAIN = (_EQUAL, _PER_SEQUENCE, _PADDED)

KERNEL = replace(
    _EQUAL,
    is_present=is_cpu,
    alternatives=(
        *(replace(kernel, is_present=is_cpu) for kernel in _PLAIN[1:]),
        _FLASHINFER,
        *(replace(kernel, is_present=is_cuda) for kernel in _PLAIN),
    ),
)
