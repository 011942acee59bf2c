"""Attention by flash-attn: torch's copy of version 2, and versions 2 and 3 where installed.

All take ragged batches, their sequences packed one after the other, or a cache in pages.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

from foretoken.profiler.attention.batch import (
    FP8,
    FP8_CACHE,
    HALF_DTYPES,
    PAGE_SIZE,
    AttentionCase,
    AttentionCode,
    dense_inputs,
    packed_inputs,
    sides_of_window,
    table_inputs,
)
from foretoken.profiler.kernel import has_capability, has_library, library

_HOPPER = 9
# Its C++ refuses pages that are no multiple.
_FLASH_2_PAGE_SIZE = 256


@cache
def _public_varlen() -> Callable[..., torch.Tensor] | None:
    """Return torch's public function where this torch has it with windows and grouped heads."""
    try:
        varlen = library("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    has_all = {"window_size", "enable_gqa"} <= set(inspect.signature(varlen).parameters)
    return varlen if has_all else None


def _bind_public_varlen(case: AttentionCase) -> Callable[..., torch.Tensor]:
    varlen, (q_max, kv_max) = _public_varlen(), case.joined.lengths
    assert varlen is not None  # noqa: S101 - where it is not, the kernel is not present

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *starts: torch.Tensor
    ) -> torch.Tensor:
        return varlen(
            query,
            key,
            value,
            *starts,
            q_max,
            kv_max,
            window_size=sides_of_window(case),
            enable_gqa=case.is_grouped,
        )

    return run


def _attend_flash(
    case: AttentionCase, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *starts: Any
) -> torch.Tensor:
    """Call torch's copy of flash-attn 2; `starts` are both None for equal sequences."""
    q_max, kv_max = case.joined.lengths
    before = {"window_size_left": case.window - 1, "window_size_right": 0} if case.window else {}
    attended, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - no public name has it
        query, key, value, *starts, q_max, kv_max, 0.0, not case.window, False, **before
    )
    return attended


def _bind_varlen(case: AttentionCase) -> Callable[..., torch.Tensor]:
    return lambda *inputs: _attend_flash(case, *inputs)


def _bind_wide_varlen(case: AttentionCase) -> Callable[..., torch.Tensor]:
    """Return a function that makes values as wide as keys first, as vLLM does for flash-attn 2."""
    missing = case.key_dim - case.value_dim

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *starts: torch.Tensor
    ) -> torch.Tensor:
        wide = functional.pad(value, (0, missing))
        return _attend_flash(case, query, key, wide, *starts)[..., : case.value_dim]

    return run


def _bind_dense_window(case: AttentionCase) -> Callable[..., torch.Tensor]:
    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: torch.Tensor
    ) -> torch.Tensor:
        tokens_first = (vectors.transpose(1, 2) for vectors in (query, key, value))
        return _attend_flash(case, *tokens_first, None, None).transpose(1, 2)

    return run


# What takes keys as wide as values, in 16 bit.
_narrow_code = partial(AttentionCode, can_run=lambda case: case.is_narrow, dtypes=HALF_DTYPES)
_FLASH_OP = "torch.ops.aten._flash_attention_forward"
TORCH_VARLEN = _narrow_code(
    source="torch.nn.attention.varlen.varlen_attn",
    make_inputs=packed_inputs,
    bind=_bind_public_varlen,
    is_present=lambda device: has_capability(8)(device) and _public_varlen() is not None,
    is_differentiable=True,
)
# The same kernel by its private name, for a torch without the public one.
TORCH_FLASH_VARLEN = _narrow_code(
    source=f"{_FLASH_OP}, varlen",
    make_inputs=packed_inputs,
    bind=_bind_varlen,
    is_present=lambda device: has_capability(8)(device) and _public_varlen() is None,
    is_differentiable=True,
)
TORCH_FLASH_WIDE = AttentionCode(
    source=f"{_FLASH_OP}, varlen, padded values",
    make_inputs=packed_inputs,
    bind=_bind_wide_varlen,
    is_present=has_capability(8),
    can_run=lambda case: case.value_dim < case.key_dim <= 256 and case.key_dim % 8 == 0,  # noqa: PLR2004
    dtypes=HALF_DTYPES,
    is_differentiable=True,
)
# Unlike a mask, its window skips blocks of keys.
TORCH_FLASH_WINDOW = AttentionCode(
    source=f"{_FLASH_OP}, window",
    make_inputs=dense_inputs,
    bind=_bind_dense_window,
    is_present=has_capability(8),
    can_run=lambda case: case.is_equal and case.window > 0 and case.is_narrow,
    dtypes=HALF_DTYPES,
)


def _only(attended: Any) -> torch.Tensor:
    """Return the output alone: some releases return the sums of the softmax next to it."""
    return attended[0] if isinstance(attended, tuple) else attended


def _bind_flash_varlen(module: str) -> Callable[[AttentionCase], Callable[..., torch.Tensor]]:
    def bind(case: AttentionCase) -> Callable[..., torch.Tensor]:
        varlen, (q_max, kv_max) = library(module).flash_attn_varlen_func, case.joined.lengths
        window = sides_of_window(case) if case.window else (-1, -1)

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            attended = varlen(
                *inputs,
                max_seqlen_q=q_max,
                max_seqlen_k=kv_max,
                causal=True,
                window_size=window,
            )
            return _only(attended)

        return run

    return bind


def _bind_flash_2_decode(case: AttentionCase) -> Callable[..., torch.Tensor]:
    decode = library("flash_attn").flash_attn_with_kvcache

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        query, key, value, table, kv_lens, _ = inputs
        attended = decode(
            query.unsqueeze(1),
            key,
            value,
            cache_seqlens=kv_lens,
            block_table=table,
            causal=True,
            window_size=sides_of_window(case) if case.window else (-1, -1),
        )
        return _only(attended).squeeze(1)

    return run


def _bind_flash_3_paged(case: AttentionCase) -> Callable[..., torch.Tensor]:
    attend = library("flash_attn_interface").flash_attn_with_kvcache
    q_max = case.joined.lengths[0]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        query, key, value, table, kv_lens, q_starts = inputs
        attended = attend(
            query,
            key,
            value,
            cache_seqlens=kv_lens,
            page_table=table,
            cu_seqlens_q=q_starts,
            max_seqlen_q=q_max,
            causal=True,
            window_size=sides_of_window(case) if case.window else (-1, -1),
        )
        return _only(attended)

    return run


def _has_flash_3(device: torch.device) -> bool:
    is_installed = has_library("flash_attn_interface")(device)
    return is_installed and torch.cuda.get_device_capability(device)[0] == _HOPPER


def _has_flash_2(device: torch.device) -> bool:
    return has_capability(8)(device) and has_library("flash_attn")(device)


def _is_decode(case: AttentionCase) -> bool:
    return set(case.joined.q_lens) == {1}


FLASH_3 = AttentionCode(
    source="flash_attn_interface.flash_attn_varlen_func",
    make_inputs=packed_inputs,
    bind=_bind_flash_varlen("flash_attn_interface"),
    is_present=_has_flash_3,
    can_run=lambda case: max(case.key_dim, case.value_dim) <= 256,  # noqa: PLR2004
    dtypes=HALF_DTYPES,
    is_differentiable=True,
)
FLASH_3_PAGED = _narrow_code(
    source="flash_attn_interface.flash_attn_with_kvcache, paged",
    make_inputs=lambda case, tensors: table_inputs(case, PAGE_SIZE, tensors, ()),
    bind=_bind_flash_3_paged,
    is_present=_has_flash_3,
)
# It takes queries in the cache's format, and writes bf16.
FLASH_3_FP8 = replace(
    FLASH_3_PAGED,
    source=f"{FLASH_3_PAGED.source}, fp8 queries",
    make_inputs=lambda case, tensors: table_inputs(case, PAGE_SIZE, tensors, (FP8, FP8)),
    variant=FP8_CACHE,
)
FLASH_2 = _narrow_code(
    source="flash_attn.flash_attn_varlen_func",
    make_inputs=packed_inputs,
    bind=_bind_flash_varlen("flash_attn"),
    is_present=_has_flash_2,
    is_differentiable=True,
)
FLASH_2_PAGED = AttentionCode(
    source="flash_attn.flash_attn_with_kvcache, paged",
    make_inputs=lambda case, tensors: table_inputs(case, _FLASH_2_PAGE_SIZE, tensors, ()),
    bind=_bind_flash_2_decode,
    is_present=_has_flash_2,
    can_run=lambda case: case.is_narrow and _is_decode(case),
    dtypes=HALF_DTYPES,
)
