"""A latent attention block for one token per sequence: it attends in the latent space.

The weights that would unpack the cache take the queries there and the values back.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from foretoken.profiler.attention.batch import is_ragged_decode, read_decode_batch
from foretoken.profiler.attention.latent import (
    LatentBlock,
    attend_absorbed,
    attend_latents,
    make_block,
    project,
)
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return make_block(dims, read_decode_batch(dims), tensors)


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    num_heads, rank = dims["num_heads"], dims["kv_lora_rank"]
    batch = read_decode_batch(dims)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        block = LatentBlock(*inputs)
        return attend_absorbed(
            block,
            project(block, num_heads),
            lambda query: attend_latents(query, block.cache, rank, batch),
        )

    return run


_PER_SEQUENCE = Kernel(
    operator="mla_decode_module",
    source="torch.matmul, torch.mm and torch.softmax, per sequence",
    make_inputs=_make_inputs,
    bind=_bind,
    can_run=is_ragged_decode,
)

KERNEL = replace(
    _PER_SEQUENCE,
    source="torch.matmul, torch.bmm and torch.softmax",
    can_run=lambda dims: not is_ragged_decode(dims),
    alternatives=(_PER_SEQUENCE,),
)
