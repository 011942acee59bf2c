"""The whole block-sparse attention block of MiniMax-M3 for one new token per sequence."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_decode import (
    BATCH_AXES,
    BATCH_DIMS,
    BATCH_FEATURES,
    BATCH_RELATIONS,
    decode_dims,
)
from foretoken.domain.operators.dsa_decode_module import SELECTED_TOKENS
from foretoken.domain.operators.spec.msa_module import (
    MSA_DIMS,
    msa_weights,
    scoring_products,
    swept_heads,
)
from foretoken.domain.operators.spec.operator import (
    HEAD_RELATION,
    Dims,
    OperatorSpec,
    Relation,
    dim_axes,
)
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    attention = 2 * d["selected_tokens"] * d["num_heads"] * d["head_dim"]
    projections = d["num_seqs"] * msa_weights(d)
    return 2 * (attention + projections + scoring_products(d, d["kv_tokens"]))


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    keys = 2 * d["selected_tokens"] * d["num_kv_heads"] * d["head_dim"]
    cache = keys + d["kv_tokens"] * d["index_head_dim"]
    return (msa_weights(d) + cache + 2 * d["num_seqs"] * d["hidden"]) * element_bytes


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for sizes in swept_heads(quick):
        for num_seqs in pick(quick, (1, 8), powers_of_two(1, 512)):
            for kv_len in pick(quick, (32, 256), powers_of_two(64, 131072)):
                limit = sizes["topk_blocks"] * sizes["block_size"]
                yield {
                    **decode_dims(num_seqs, kv_len),
                    "selected_tokens": num_seqs * min(kv_len, limit),
                    **sizes,
                }


SPEC = OperatorSpec(
    name="msa_decode_module",
    summary="block-sparse attention block of one token per sequence, hidden state to hidden state",
    group="attention",
    dims=(
        *BATCH_DIMS,
        SELECTED_TOKENS,
        *MSA_DIMS,
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "row_block_waves": lambda d, num_sms: ceil_divide(d["num_seqs"], 64) / num_sms,
        **BATCH_FEATURES,
        "selected_ratio": lambda d, _: d["selected_tokens"] / d["kv_tokens"],
        "heads_ratio": lambda d, _: d["num_heads"] / d["num_kv_heads"],
        "index_heads_ratio": lambda d, _: d["index_num_heads"] / d["num_kv_heads"],
    },
    costs={
        "sequences": lambda d, _: d["num_seqs"],
        "sequence_heads": lambda d, _: d["num_seqs"] * d["num_heads"],
        "longest": lambda d, _: d["kv_tokens_max"],
        "weights": lambda d, _: msa_weights(d),
        "context": lambda d, _: d["kv_tokens"],
        "scoring": lambda d, _: scoring_products(d, d["kv_tokens"]),
        "selected": lambda d, _: d["selected_tokens"] * d["num_kv_heads"],
        "attention": lambda d, _: d["selected_tokens"] * d["num_heads"],
    },
    axes={**BATCH_AXES, **dim_axes("num_heads", "num_kv_heads", "hidden")},
    relations=(
        HEAD_RELATION,
        *BATCH_RELATIONS,
        Relation("selected_tokens", "kv_tokens"),
    ),
    sweep=_sweep,
    num_weights=msa_weights,
)
