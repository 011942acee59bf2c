"""A latent attention block for new tokens: the whole context's keys and values are unpacked."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from foretoken.profiler.attention.batch import is_ragged_prefill, read_prefill_batch
from foretoken.profiler.attention.latent import LatentBlock, attend_unpacked, make_block, project
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return make_block(dims, read_prefill_batch(dims), tensors)


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    num_heads, rank, nope = dims["num_heads"], dims["kv_lora_rank"], dims["qk_nope_head_dim"]
    batch = read_prefill_batch(dims)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        block = LatentBlock(*inputs)
        query = torch.cat(project(block, num_heads), dim=-1)
        latents, shared = block.cache[..., :rank], block.cache[..., rank:]
        unpacked = (latents @ block.latent_up).unflatten(-1, (num_heads, -1))
        shared = shared.unsqueeze(1).expand(-1, num_heads, -1)
        key = torch.cat((unpacked[..., :nope], shared), dim=-1)
        attended = attend_unpacked(batch, query, key, unpacked[..., nope:], block.mask)
        return attended.flatten(1) @ block.out

    return run


_PER_SEQUENCE = Kernel(
    operator="mla_prefill_module",
    source="torch.matmul and torch.nn.functional.scaled_dot_product_attention, per sequence",
    make_inputs=_make_inputs,
    bind=_bind,
    can_run=is_ragged_prefill,
)

KERNEL = replace(
    _PER_SEQUENCE,
    source="torch.matmul and torch.nn.functional.scaled_dot_product_attention",
    can_run=lambda dims: not is_ragged_prefill(dims),
    alternatives=(_PER_SEQUENCE,),
)
