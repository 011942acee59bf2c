"""A latent attention block for one token per sequence: it attends in the latent space.

The weights that would unpack the cache take the queries there and the values back.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from foretoken.profiler.attention.batch import is_ragged_decode, read_decode_batch
from foretoken.profiler.attention.latent import LatentBlock, attend_latents, make_block, project
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return make_block(dims, read_decode_batch(dims), tensors)


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    num_heads, rank, nope = dims["num_heads"], dims["kv_lora_rank"], dims["qk_nope_head_dim"]
    scale = (nope + dims["qk_rope_head_dim"]) ** -0.5
    batch = read_decode_batch(dims)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        block = LatentBlock(*inputs)
        query_nope, query_rope = project(block, num_heads)
        # [rank, num_heads, nope + value] as one matrix per head, without a copy.
        up = block.latent_up.unflatten(-1, (num_heads, -1)).transpose(0, 1)
        query = torch.bmm(query_nope.transpose(0, 1), up[..., :nope].transpose(1, 2))
        query = torch.cat((query.transpose(0, 1), query_rope), dim=-1) * scale
        attended = attend_latents(query, block.cache, rank, batch)
        values = torch.bmm(attended.transpose(0, 1), up[..., nope:])
        return values.transpose(0, 1).flatten(1) @ block.out

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
