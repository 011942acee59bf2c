"""Multi-head latent attention of new tokens, on keys and values unpacked for every head.

The attention alone: the projections around it are operators of their own, or part of
`mla_prefill_module`. Source: DeepSeek-V2, section 2.1, 2024.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_prefill import (
    BATCH_DIMS,
    BATCH_FEATURES,
    BATCH_RELATIONS,
    prefill_dims,
    q_block_waves,
    unequal_prefill_dims,
)
from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity


def _key_dim(d: Dims) -> Quantity:
    return d["qk_nope_head_dim"] + d["qk_rope_head_dim"]


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    return 2 * d["score_pairs"] * d["num_heads"] * (_key_dim(d) + d["v_head_dim"])


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    queries = d["q_tokens"] * d["num_heads"] * (_key_dim(d) + d["v_head_dim"])
    # All heads share the part of the key that carries the position.
    keys = d["kv_tokens"] * (
        d["num_heads"] * (d["qk_nope_head_dim"] + d["v_head_dim"]) + d["qk_rope_head_dim"]
    )
    return (queries + keys) * element_bytes


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    widths = {
        "qk_nope_head_dim": 32 if quick else 128,
        "qk_rope_head_dim": 16 if quick else 64,
        "v_head_dim": 32 if quick else 128,
    }
    for num_heads in pick(quick, (8,), (16, 128)):
        for num_seqs in (1, 4):
            for q_len in pick(quick, (16, 128), powers_of_two(16, 16384)):
                for context_len in pick(quick, (0, 128), (0, *powers_of_two(256, 16384))):
                    dims = prefill_dims(num_seqs, q_len, context_len)
                    yield {**dims, "num_heads": num_heads, **widths}
    for q_len in pick(quick, (64,), (64, 512, 2048)):
        for context_len in pick(quick, (0,), (0, 2048)):
            dims = unequal_prefill_dims(4, q_len, context_len)
            yield {**dims, "num_heads": 8 if quick else 16, **widths}


SPEC = OperatorSpec(
    name="mla_prefill",
    summary="softmax(QK^T)V of new tokens, causal, latent keys and values unpacked",
    group="attention",
    dims=(
        *BATCH_DIMS,
        Dim("num_heads", "heads on this device"),
        Dim("qk_nope_head_dim", "features of a head's key without position"),
        Dim("qk_rope_head_dim", "features of a key with position, shared by the heads"),
        Dim("v_head_dim", "features of a head's value"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "q_block_waves": q_block_waves,
        **BATCH_FEATURES,
    },
    relations=BATCH_RELATIONS,
    sweep=_sweep,
    # Flash attention recomputes the scores: three products as wide as a key and two as wide as a
    # value, instead of one of each; a key 1.5 times as wide as a value, as in all such models.
    backward_work_ratio=2.6,
    # Queries, unpacked keys and values; the output is the input of the projection after it.
    saved_elements=lambda d: (
        (d["q_tokens"] + d["kv_tokens"]) * d["num_heads"] * _key_dim(d)
        + d["kv_tokens"] * d["num_heads"] * d["v_head_dim"]
    ),
)
