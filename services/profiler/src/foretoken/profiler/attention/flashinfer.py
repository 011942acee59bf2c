"""Attention by FlashInfer where installed: on a cache in pages, or on packed keys and values."""

from collections.abc import Callable
from functools import cache

import torch

from foretoken.profiler.attention.batch import (
    FP8,
    FP8_CACHE,
    HALF_DTYPES,
    PAGE_SIZE,
    AttentionCase,
    AttentionCode,
    list_inputs,
    packed_inputs,
    sides_of_window,
)
from foretoken.profiler.kernel import Inputs, has_capability, has_library, library

_WORKSPACE_BYTES = 128 * 2**20
# Head sizes it has kernels for.
_HEAD_DIMS = (64, 128, 256)
# Query heads per key head from which a decode takes tensor cores, as SGLang decides; always on an
# fp8 cache.
_TENSOR_CORE_GROUP = 4


@cache
def workspace(device: torch.device) -> torch.Tensor:
    """Return the memory that FlashInfer's wrappers share, one at a time."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def planned(
    plan: Callable[[AttentionCase, Inputs], Callable[..., torch.Tensor]],
) -> Callable[[AttentionCase], Callable[..., torch.Tensor]]:
    """Return a bind that plans at the first call, on the host, as a server does once per step.

    All sets of inputs have the same lengths and pages, so that one plan serves them all.
    """

    def bind(case: AttentionCase) -> Callable[..., torch.Tensor]:
        made: list[Callable[..., torch.Tensor]] = []

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            if not made:
                made.append(plan(case, inputs))
            return made[0](*inputs)

        return run

    return bind


def _plan_decode(case: AttentionCase, inputs: Inputs) -> Callable[..., torch.Tensor]:
    query, key, _, starts, pages, last_lens, _ = inputs
    wrapper = library("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        workspace(query.device),
        "NHD",
        use_tensor_cores=key.dtype is FP8
        or case.num_heads >= _TENSOR_CORE_GROUP * case.num_kv_heads,
    )
    wrapper.plan(
        starts,
        pages,
        last_lens,
        case.num_heads,
        case.num_kv_heads,
        case.key_dim,
        key.shape[1],
        window_left=sides_of_window(case)[0],
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
    )
    return lambda *inputs: wrapper.run(inputs[0], (inputs[1], inputs[2]))


def _plan_prefill(case: AttentionCase, inputs: Inputs) -> Callable[..., torch.Tensor]:
    query, key, _, starts, pages, last_lens, q_starts = inputs
    wrapper = library("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
        workspace(query.device), "NHD"
    )
    wrapper.plan(
        q_starts,
        starts,
        pages,
        last_lens,
        case.num_heads,
        case.num_kv_heads,
        case.key_dim,
        key.shape[1],
        causal=True,
        window_left=sides_of_window(case)[0],
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
    )
    return lambda *inputs: wrapper.run(inputs[0], (inputs[1], inputs[2]))


def _plan_ragged(case: AttentionCase, inputs: Inputs) -> Callable[..., torch.Tensor]:
    query, key, _, q_starts, kv_starts = inputs
    wrapper = library("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(
        workspace(query.device), "NHD"
    )
    wrapper.plan(
        q_starts,
        kv_starts,
        case.num_heads,
        case.num_kv_heads,
        case.key_dim,
        head_dim_vo=case.value_dim,
        causal=True,
        window_left=sides_of_window(case)[0],
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
    )
    return lambda *inputs: wrapper.run(*inputs[:3])


def _flashinfer(
    name: str,
    plan: Callable[[AttentionCase, Inputs], Callable[..., torch.Tensor]],
    kv_dtype: torch.dtype | None = None,
) -> AttentionCode:
    return AttentionCode(
        source=f"flashinfer.{name}, paged",
        make_inputs=lambda case, tensors: list_inputs(case, PAGE_SIZE, tensors, kv_dtype),
        bind=planned(plan),
        is_present=lambda device: has_capability(8)(device) and has_library("flashinfer")(device),
        can_run=lambda case: case.is_narrow and case.key_dim in _HEAD_DIMS,
        dtypes=HALF_DTYPES,
        variant=FP8_CACHE if kv_dtype else "",
    )


_DECODE_WRAPPER = "BatchDecodeWithPagedKVCacheWrapper"
_PREFILL_WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"
FLASHINFER_DECODE = _flashinfer(_DECODE_WRAPPER, _plan_decode)
FLASHINFER_DECODE_FP8 = _flashinfer(_DECODE_WRAPPER, _plan_decode, FP8)
FLASHINFER_PREFILL = _flashinfer(_PREFILL_WRAPPER, _plan_prefill)
FLASHINFER_PREFILL_FP8 = _flashinfer(_PREFILL_WRAPPER, _plan_prefill, FP8)
# Keys of 192 features on values of 128, as latent attention unpacks them.
FLASHINFER_RAGGED = AttentionCode(
    source="flashinfer.BatchPrefillWithRaggedKVCacheWrapper",
    make_inputs=packed_inputs,
    bind=planned(_plan_ragged),
    is_present=lambda device: has_capability(8)(device) and has_library("flashinfer")(device),
    can_run=lambda case: (case.key_dim, case.value_dim) == (192, 128),
    dtypes=HALF_DTYPES,
)
