"""The whole sparse latent attention block (DSA) for one new token per sequence.

Source: DeepSeek-V3.2-Exp, section 2.1, 2025; GLM-5 has the same with other sizes.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_decode import (
    BATCH_AXES,
    BATCH_DIMS,
    BATCH_FEATURES,
    BATCH_RELATIONS,
    decode_dims,
)
from foretoken.domain.operators.dsa_prefill_module import num_weights
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
    OperatorSpec,
    Relation,
    dim_axes,
)
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide

SELECTED_TOKENS = Dim("selected_tokens", "context that the selection leaves, summed over sequences")


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    latent_dim = 2 * d["kv_lora_rank"] + d["qk_rope_head_dim"]
    attention = d["selected_tokens"] * d["num_heads"] * latent_dim
    weights = token_weights(d) + unpacking_weights(d) + indexer_weights(d)
    return 2 * (attention + d["num_seqs"] * weights + scoring_products(d, d["kv_tokens"]))


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    cache = d["selected_tokens"] * (d["kv_lora_rank"] + d["qk_rope_head_dim"])
    elements = num_weights(d) + cache + 2 * d["num_seqs"] * d["hidden"]
    return elements * element_bytes + index_key_bytes(d, d["kv_tokens"])


def swept_batches(quick: bool, topk: int) -> Iterator[Mapping[str, int]]:
    """Yield batches of equal sequences that see so many tokens at most."""
    for num_seqs in pick(quick, (1, 8), powers_of_two(1, 512)):
        for kv_len in pick(quick, (32, 256), powers_of_two(64, 131072)):
            selected = num_seqs * min(kv_len, topk)
            yield {**decode_dims(num_seqs, kv_len), "selected_tokens": selected}


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    widths = QUICK_WIDTHS if quick else FULL_WIDTHS
    for indexer in swept_indexers(quick):
        for num_heads in pick(quick, (8,), (16, 128)):
            for batch in swept_batches(quick, indexer["index_topk"]):
                yield {**batch, "num_heads": num_heads, **widths, **indexer}


SPEC = OperatorSpec(
    name="dsa_decode_module",
    summary="sparse latent attention block of one token per sequence, hidden state to hidden state",
    group="attention",
    dims=(
        *BATCH_DIMS,
        SELECTED_TOKENS,
        *MODULE_DIMS,
        *INDEXER_DIMS,
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "row_block_waves": lambda d, num_sms: ceil_divide(d["num_seqs"], 64) / num_sms,
        **BATCH_FEATURES,
        "selected_ratio": lambda d, _: d["selected_tokens"] / d["kv_tokens"],
    },
    costs={
        "sequences": lambda d, _: d["num_seqs"],
        "heads": lambda d, _: d["num_heads"],
        "sequence_heads": lambda d, _: d["num_seqs"] * d["num_heads"],
        # Without an indexer nothing goes over more of the context than it selected.
        "longest": lambda d, _: has_indexer(d) * d["kv_tokens_max"],
        "weights": lambda d, _: num_weights(d),
        "context": lambda d, _: has_indexer(d) * d["kv_tokens"],
        "scoring": lambda d, _: scoring_products(d, d["kv_tokens"]),
        "selected": lambda d, _: d["selected_tokens"],
        # Kernels take heads in groups of 64, whatever there is of them. Source: FlashMLA.
        "padded_attention": lambda d, _: d["selected_tokens"] * ceil_divide(d["num_heads"], 64),
        "attention": lambda d, _: d["selected_tokens"] * d["num_heads"],
    },
    axes={**BATCH_AXES, **dim_axes("num_heads", "hidden", "index_num_heads")},
    relations=(
        *BATCH_RELATIONS,
        Relation("selected_tokens", "kv_tokens"),
    ),
    sweep=_sweep,
    num_weights=num_weights,
    num_launches=LAUNCHES_OF_MLA + LAUNCHES_OF_INDEXER,
)
