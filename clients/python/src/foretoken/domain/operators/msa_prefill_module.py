"""The whole block-sparse attention block of MiniMax-M3 for new tokens, indexer included."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_prefill import (
    BATCH_AXES,
    BATCH_DIMS,
    BATCH_FEATURES,
    BATCH_RELATIONS,
    prefill_dims,
)
from foretoken.domain.operators.dsa_prefill_module import SELECTED_PAIRS
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
from foretoken.domain.operators.spec.query_blocks import QueryBlocks
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.operators.spec.visible_pairs import limited_pairs
from foretoken.domain.units import Quantity, ceil_divide, smaller


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    attention = 2 * d["selected_pairs"] * d["num_heads"] * d["head_dim"]
    projections = d["q_tokens"] * msa_weights(d)
    return 2 * (attention + projections + scoring_products(d, d["score_pairs"]))


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    # Queries may all choose the same blocks.
    seen = smaller(d["kv_tokens"], d["num_seqs"] * d["topk_blocks"] * d["block_size"])
    cache = 2 * seen * d["num_kv_heads"] * d["head_dim"] + d["kv_tokens"] * d["index_head_dim"]
    return (msa_weights(d) + cache + 2 * d["q_tokens"] * d["hidden"]) * element_bytes


_INDEXER_BLOCKS = QueryBlocks(heads="index_num_heads", head_dim="index_head_dim")
_ATTENTION_BLOCKS = QueryBlocks(pairs="selected_pairs")


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for sizes in swept_heads(quick):
        for num_seqs in pick(quick, (1, 2), (1, 4)):
            for q_len in pick(quick, (16, 64, 256), powers_of_two(64, 16384)):
                for cached in pick(quick, (0,), (0, 4096, 65536)):
                    limit = sizes["topk_blocks"] * sizes["block_size"]
                    yield {
                        **prefill_dims(num_seqs, q_len, cached),
                        "selected_pairs": num_seqs * limited_pairs(q_len, cached, limit),
                        **sizes,
                    }


SPEC = OperatorSpec(
    name="msa_prefill_module",
    summary="block-sparse attention block of new tokens, from hidden state to hidden state",
    group="attention",
    dims=(*BATCH_DIMS, SELECTED_PAIRS, *MSA_DIMS),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "row_block_waves": lambda d, num_sms: ceil_divide(d["q_tokens"], 128) / num_sms,
        **BATCH_FEATURES,
        "selected_per_query": lambda d, _: d["selected_pairs"] / d["q_tokens"],
        "context_len_mean": BATCH_AXES["context_len_mean"],
        "kv_len_mean": lambda d, _: d["kv_tokens"] / d["num_seqs"],
        "heads_ratio": lambda d, _: d["num_heads"] / d["num_kv_heads"],
    },
    costs={
        **_INDEXER_BLOCKS.costs(64, "index_"),
        **_ATTENTION_BLOCKS.costs(64),
        "sequences": lambda d, _: d["num_seqs"],
        "longest": lambda d, _: d["kv_tokens"] / d["num_seqs"],
        "tokens": lambda d, _: d["q_tokens"],
        "token_heads": lambda d, _: d["q_tokens"] * d["num_heads"],
        "token_features": lambda d, _: d["q_tokens"] * d["hidden"],
        "row_blocks": lambda d, _: ceil_divide(d["q_tokens"], 128) * d["num_heads"],
        "context": lambda d, _: d["kv_tokens"],
        "weights": lambda d, _: msa_weights(d),
        "projections": lambda d, _: d["q_tokens"] * msa_weights(d),
        "score_pairs": lambda d, _: d["score_pairs"],
        "scoring": lambda d, _: scoring_products(d, d["score_pairs"]),
        "selected_pairs": lambda d, _: d["selected_pairs"] * d["num_kv_heads"],
        "attention": lambda d, _: d["selected_pairs"] * d["num_heads"],
    },
    axes={**BATCH_AXES, **dim_axes("num_heads", "num_kv_heads", "hidden")},
    relations=(
        HEAD_RELATION,
        *BATCH_RELATIONS,
        Relation("selected_pairs", "score_pairs"),
    ),
    sweep=_sweep,
    num_weights=msa_weights,
)
