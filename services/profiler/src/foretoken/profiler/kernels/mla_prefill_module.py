"""A latent attention block for new tokens: the whole context's keys and values are unpacked."""

from collections.abc import Callable, Mapping

import torch

from foretoken.profiler.attention import attend, split_evenly
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory
from foretoken.profiler.latent_attention import LatentBlock, make_block, project


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    q_len = split_evenly(dims["q_tokens"], dims["num_seqs"])
    kv_len = split_evenly(dims["kv_tokens"], dims["num_seqs"])
    return make_block(dims, (q_len, kv_len), tensors)


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    num_heads, rank, nope = dims["num_heads"], dims["kv_lora_rank"], dims["qk_nope_head_dim"]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        block = LatentBlock(*inputs)
        query = torch.cat(project(block, num_heads), dim=-1)
        latents, shared = block.cache[..., :rank], block.cache[..., rank:]
        unpacked = (latents @ block.latent_up).unflatten(-1, (num_heads, -1))
        shared = shared.unsqueeze(2).expand(-1, -1, num_heads, -1)
        key = torch.cat((unpacked[..., :nope], shared), dim=-1)
        value = unpacked[..., nope:]
        attended = attend(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), block.mask
        )
        return attended.transpose(1, 2).flatten(2) @ block.out

    return run


KERNEL = Kernel(
    operator="mla_prefill_module",
    source="torch.matmul and torch.nn.functional.scaled_dot_product_attention",
    make_inputs=_make_inputs,
    bind=_bind,
)
