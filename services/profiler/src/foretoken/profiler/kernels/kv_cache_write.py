"""Scatter new keys and values into slots of a cache, which may hold them in 8 bit (`kv=fp8`)."""

from collections.abc import Mapping

import torch

from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory

# Slots in the cache per token written, so that writes are scattered as in a busy cache.
_SLOTS_PER_TOKEN = 4
_FEWEST_SLOTS = 1024


def _make_inputs(
    dims: Mapping[str, int], tensors: TensorFactory, cache_dtype: torch.dtype | None = None
) -> Inputs:
    num_tokens = dims["num_tokens"]
    num_slots = max(_SLOTS_PER_TOKEN * num_tokens, _FEWEST_SLOTS)
    shape = (dims["num_kv_heads"], dims["head_dim"])
    return (
        tensors.random(num_slots, *shape, dtype=cache_dtype),
        tensors.random(num_slots, *shape, dtype=cache_dtype),
        tensors.distinct_integers(num_slots, num_tokens),
        tensors.random(num_tokens, *shape),
        tensors.random(num_tokens, *shape),
    )


def _run(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    key_cache.index_copy_(0, slots, key)
    value_cache.index_copy_(0, slots, value)


def _run_narrow(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    for cache, new in ((key_cache, key), (value_cache, value)):
        # As bytes: torch has no scatter of 8-bit floats.
        narrow = new.to(cache.dtype).view(torch.uint8)
        cache.view(torch.uint8).index_copy_(0, slots, narrow)


KERNEL = Kernel(
    operator="kv_cache_write",
    source="torch.Tensor.index_copy_",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
    alternatives=(
        Kernel(
            operator="kv_cache_write",
            source="torch.Tensor.to + index_copy_",
            variant="kv=fp8",
            dtypes=frozenset({DType.FP16, DType.BF16}),
            make_inputs=lambda dims, tensors: _make_inputs(dims, tensors, torch.float8_e4m3fn),
            bind=lambda _: _run_narrow,
        ),
    ),
)
