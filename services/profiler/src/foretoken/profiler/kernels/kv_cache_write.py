"""Scatter new keys and values into slots of a cache."""

from collections.abc import Mapping

import torch

from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory

# Slots in the cache per token written, so that writes are scattered as in a busy cache.
_SLOTS_PER_TOKEN = 4
_FEWEST_SLOTS = 1024


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    num_tokens = dims["num_tokens"]
    num_slots = max(_SLOTS_PER_TOKEN * num_tokens, _FEWEST_SLOTS)
    shape = (dims["num_kv_heads"], dims["head_dim"])
    return (
        tensors.random(num_slots, *shape),
        tensors.random(num_slots, *shape),
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


KERNEL = Kernel(
    operator="kv_cache_write",
    source="torch.Tensor.index_copy_",
    make_inputs=_make_inputs,
    bind=lambda _: _run,
)
