"""Latent attention by its definition on unpacked keys, one sequence, head and query at a time."""

import torch

from foretoken.profiler.attention.latent import LatentBlock
from foretoken.profiler.attention.ragged import Batch

WIDTHS = {
    "num_heads": 3,
    "hidden": 16,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: list[torch.Tensor]
) -> torch.Tensor:
    """Return attention of one head of one sequence, query by query."""
    rows = []
    for vector, places in zip(query, chosen, strict=True):
        weights = (key[places] @ vector / len(vector) ** 0.5).softmax(0)
        rows.append(weights @ value[places])
    return torch.stack(rows)


def normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    epsilon = torch.finfo(x.dtype).eps
    return weight * x / ((x * x).mean(-1, keepdim=True) + epsilon).sqrt()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return pairs of features rotated, of the two that `WIDTHS` has, or none."""
    if not x.shape[1]:
        return x
    return torch.stack(
        (x[:, 0] * cos[:, 0] - x[:, 1] * sin[:, 0], x[:, 1] * cos[:, 1] + x[:, 0] * sin[:, 1]), 1
    )


def run_sequence(
    block: LatentBlock, batch: Batch, index: int, chosen: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the block's output for one sequence, keys and values unpacked head by head.

    `chosen` are the places in the sequence that each query sees, all up to its own without.
    """
    hidden, cos, sin = (
        tensor.split(batch.q_lens)[index] for tensor in (block.hidden, block.cos, block.sin)
    )
    old = block.cache.split(batch.kv_lens)[index][: -len(hidden)]
    low, latents, shared = (hidden @ block.down).split((6, 8, cos.shape[1]), 1)
    latents = torch.cat((old[:, :8], normalize(latents, block.latent_norm)))
    shared = torch.cat((old[:, 8:], _rotate(shared, cos, sin)))
    queries = (normalize(low, block.query_norm) @ block.query_up).chunk(3, 1)
    unpacked = (latents @ block.latent_up).chunk(3, 1)
    if chosen is None:
        first = len(latents) - len(hidden)
        chosen = [torch.arange(first + place + 1) for place in range(len(hidden))]
    heads = []
    for query, pair in zip(queries, unpacked, strict=True):
        turned = torch.cat((query[:, :4], _rotate(query[:, 4:], cos, sin)), 1)
        keys = torch.cat((pair[:, :4], shared), 1)
        heads.append(_attend(turned, keys, pair[:, 4:], chosen))
    return torch.cat(heads, 1) @ block.out
