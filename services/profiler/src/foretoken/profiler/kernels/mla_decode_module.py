"""A latent attention block for one token per sequence: it attends in the latent space.

The weights that would unpack the cache take the queries there and the values back.
"""

from collections.abc import Callable, Mapping

import torch

from foretoken.profiler.attention import split_evenly
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory
from foretoken.profiler.latent_attention import LatentBlock, attend_latents, make_block, project


def _make_inputs(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    kv_len = split_evenly(dims["kv_tokens"], dims["num_seqs"])
    return make_block(dims, (1, kv_len), tensors)


def _bind(dims: Mapping[str, int]) -> Callable[..., torch.Tensor]:
    num_heads, rank, nope = dims["num_heads"], dims["kv_lora_rank"], dims["qk_nope_head_dim"]
    scale = (nope + dims["qk_rope_head_dim"]) ** -0.5

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        block = LatentBlock(*inputs)
        query_nope, query_rope = (part.squeeze(1) for part in project(block, num_heads))
        # [rank, num_heads, nope + value] as one matrix per head, without a copy.
        up = block.latent_up.unflatten(-1, (num_heads, -1)).transpose(0, 1)
        query = torch.bmm(query_nope.transpose(0, 1), up[..., :nope].transpose(1, 2))
        query = torch.cat((query.transpose(0, 1), query_rope), dim=-1) * scale
        attended = attend_latents(query, block.cache, rank)
        values = torch.bmm(attended.transpose(0, 1), up[..., nope:])
        return values.transpose(0, 1).flatten(1) @ block.out

    return run


KERNEL = Kernel(
    operator="mla_decode_module",
    source="torch.matmul, torch.bmm and torch.softmax",
    make_inputs=_make_inputs,
    bind=_bind,
)
