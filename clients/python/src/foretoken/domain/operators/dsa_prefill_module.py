"""The whole sparse latent attention block (DSA) for new tokens, indexer and projections included.

Source: DeepSeek-V3.2-Exp, section 2.1, 2025; GLM-5 has the same with other sizes.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_prefill import (
    BATCH_AXES,
    BATCH_DIMS,
    BATCH_FEATURES,
    BATCH_RELATIONS,
    prefill_dims,
)
from foretoken.domain.operators.spec.indexer import (
    INDEXER_DIMS,
    LAUNCHES_OF_INDEXER,
    has_indexer,
    index_key_bytes,
    indexer_weights,
    scoring_products,
    swept_indexers,
)
from foretoken.domain.operators.spec.mla_module import (
    FULL_WIDTHS,
    LAUNCHES_OF_MLA,
    MODULE_DIMS,
    QUICK_WIDTHS,
    token_weights,
    unpacking_weights,
)
from foretoken.domain.operators.spec.operator import (
    Dim,
    Dims,
    FeatureFormula,
    OperatorSpec,
    Relation,
    dim_axes,
)
from foretoken.domain.operators.spec.query_blocks import QueryBlocks
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.operators.spec.visible_pairs import limited_pairs
from foretoken.domain.units import Quantity, ceil_divide, smaller

SELECTED_PAIRS = Dim("selected_pairs", "query-key pairs that the selection leaves")


def _attention_products(d: Dims) -> Quantity:
    """Return the multiply-adds of the attention in the latent space or on unpacked keys.

    Engines choose: the latent space where keys are selected, unpacked keys for short sequences.
    """
    latent_dim = 2 * d["kv_lora_rank"] + d["qk_rope_head_dim"]
    head_dim = d["qk_nope_head_dim"] + d["qk_rope_head_dim"] + d["v_head_dim"]
    heads_pairs = d["selected_pairs"] * d["num_heads"]
    latent = heads_pairs * latent_dim + d["q_tokens"] * unpacking_weights(d)
    return smaller(latent, heads_pairs * head_dim + d["kv_tokens"] * unpacking_weights(d))


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    projections = d["q_tokens"] * (token_weights(d) + indexer_weights(d))
    return 2 * (_attention_products(d) + projections + scoring_products(d, d["score_pairs"]))


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    # Queries may all choose the same keys.
    seen = smaller(d["kv_tokens"], d["num_seqs"] * d["index_topk"])
    cache = seen * (d["kv_lora_rank"] + d["qk_rope_head_dim"])
    elements = num_weights(d) + cache + 2 * d["q_tokens"] * d["hidden"]
    return elements * element_bytes + index_key_bytes(d, d["kv_tokens"])


def num_weights(d: Dims) -> Quantity:
    """Return the weights of the block: of its projections and of its indexer."""
    return token_weights(d) + unpacking_weights(d) + indexer_weights(d)


def _row_waves(d: Dims, num_sms: int) -> Quantity:
    return ceil_divide(d["q_tokens"], 128) / num_sms


_INDEXER_BLOCKS = QueryBlocks(heads="index_num_heads", head_dim="index_head_dim")
_ATTENTION_BLOCKS = QueryBlocks(pairs="selected_pairs", head_dim="kv_lora_rank")
COSTS: Mapping[str, FeatureFormula] = {
    **_INDEXER_BLOCKS.costs(64, "index_"),
    **_ATTENTION_BLOCKS.costs(64),
    "sequences": lambda d, _: d["num_seqs"],
    "tokens": lambda d, _: d["q_tokens"],
    "token_heads": lambda d, _: d["q_tokens"] * d["num_heads"],
    "token_features": lambda d, _: d["q_tokens"] * d["hidden"],
    "context": lambda d, _: d["kv_tokens"],
    "longest": lambda d, _: has_indexer(d) * d["kv_tokens"] / d["num_seqs"],
    "row_blocks": lambda d, _: ceil_divide(d["q_tokens"], 128) * d["num_heads"],
    "weights": lambda d, _: num_weights(d),
    "projections": lambda d, _: d["q_tokens"] * token_weights(d),
    "score_pairs": lambda d, _: has_indexer(d) * d["score_pairs"],
    "scoring": lambda d, _: scoring_products(d, d["score_pairs"]),
    "selected_pairs": lambda d, _: d["selected_pairs"],
    # Kernels take heads in groups of 64, whatever there is of them. Source: FlashMLA.
    "padded_attention": lambda d, _: d["selected_pairs"] * ceil_divide(d["num_heads"], 64),
    "attention": lambda d, _: d["selected_pairs"] * d["num_heads"],
}


def swept_batches(quick: bool, topk: int) -> Iterator[Mapping[str, int]]:
    """Yield batches of equal sequences whose queries see so many keys at most."""
    lengths = pick(quick, (16, 64, 256), powers_of_two(64, 16384))
    for num_seqs in pick(quick, (1, 2), (1, 4)):
        for q_len in lengths:
            for cached in pick(quick, (0,), (0, 4096, 65536)):
                pairs = num_seqs * limited_pairs(q_len, cached, topk)
                yield {**prefill_dims(num_seqs, q_len, cached), "selected_pairs": pairs}


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    widths = QUICK_WIDTHS if quick else FULL_WIDTHS
    for indexer in swept_indexers(quick):
        for num_heads in pick(quick, (8,), (16, 128)):
            for batch in swept_batches(quick, indexer["index_topk"]):
                yield {**batch, "num_heads": num_heads, **widths, **indexer}


SPEC = OperatorSpec(
    name="dsa_prefill_module",
    summary="sparse latent attention block of new tokens, from hidden state to hidden state",
    group="attention",
    dims=(*BATCH_DIMS, SELECTED_PAIRS, *MODULE_DIMS, *INDEXER_DIMS),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "row_block_waves": _row_waves,
        **BATCH_FEATURES,
        "selected_per_query": lambda d, _: d["selected_pairs"] / d["q_tokens"],
        "context_len_mean": BATCH_AXES["context_len_mean"],
        "kv_len_mean": lambda d, _: d["kv_tokens"] / d["num_seqs"],
    },
    costs=COSTS,
    axes={**BATCH_AXES, **dim_axes("num_heads", "hidden", "index_num_heads")},
    relations=(
        *BATCH_RELATIONS,
        Relation("selected_pairs", "score_pairs"),
    ),
    sweep=_sweep,
    num_weights=num_weights,
    num_launches=LAUNCHES_OF_MLA + LAUNCHES_OF_INDEXER,
)
