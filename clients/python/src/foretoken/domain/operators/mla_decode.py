"""Multi-head latent attention of one new token per sequence, on the latent cache as it is.

The attention alone, in the latent space: what takes the queries there and the values back are
operators of their own, or part of `mla_decode_module`. Source: DeepSeek-V2, section 2.1, 2024.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_decode import (
    BATCH_AXES,
    BATCH_DIMS,
    BATCH_FEATURES,
    BATCH_RELATIONS,
    decode_dims,
    kv_block_fill,
    ragged_decodes,
)
from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec, dim_axes
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    per_token = 2 * d["kv_lora_rank"] + d["qk_rope_head_dim"]
    return 2 * d["kv_tokens"] * d["num_heads"] * per_token


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    queries = d["num_seqs"] * d["num_heads"] * (2 * d["kv_lora_rank"] + d["qk_rope_head_dim"])
    # One latent vector is key and value of every head.
    cache = d["kv_tokens"] * (d["kv_lora_rank"] + d["qk_rope_head_dim"])
    return (queries + cache) * element_bytes


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    widths = {
        "kv_lora_rank": 64 if quick else 512,
        "qk_rope_head_dim": 16 if quick else 64,
    }
    for num_heads in pick(quick, (8,), (16, 128)):
        for num_seqs in pick(quick, (1, 8), powers_of_two(1, 512)):
            for kv_len in pick(quick, (32, 256, 1024), powers_of_two(64, 32768)):
                yield {**decode_dims(num_seqs, kv_len), "num_heads": num_heads, **widths}
    for dims in ragged_decodes(quick):
        yield {**dims, "num_heads": 8 if quick else 128, **widths}


SPEC = OperatorSpec(
    name="mla_decode",
    summary="softmax(qC^T)C of one query per sequence over the latent cache C",
    group="attention",
    dims=(
        *BATCH_DIMS,
        Dim("num_heads", "heads on this device"),
        Dim("kv_lora_rank", "features of the latent vector"),
        Dim("qk_rope_head_dim", "features of a key with position, shared by the heads"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "blocks_per_sm": lambda d, num_sms: (
            d["num_seqs"] * ceil_divide(d["num_heads"], 64) / num_sms
        ),
        **BATCH_FEATURES,
        "kv_block_fill": kv_block_fill,
    },
    axes={**BATCH_AXES, **dim_axes("num_heads", "kv_lora_rank", "qk_rope_head_dim")},
    relations=BATCH_RELATIONS,
    sweep=_sweep,
)
