"""The whole compressed attention block of DeepSeek-V4 (CSA, HCA or window) for new tokens."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_prefill import TOKEN_RELATIONS
from foretoken.domain.operators.spec.compressed_module import (
    COMPRESSED_DIMS,
    compressed_weights,
    swept_sizes,
)
from foretoken.domain.operators.spec.indexer import index_key_bytes, scoring_products
from foretoken.domain.operators.spec.operator import (
    Dim,
    Dims,
    OperatorSpec,
    Relation,
    dim_axes,
)
from foretoken.domain.operators.spec.query_blocks import QueryBlocks
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.operators.spec.visible_pairs import block_pairs, limited_pairs
from foretoken.domain.units import Quantity, ceil_divide, smaller


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    pairs = d["window_pairs"] + d["selected_pairs"]
    attention = 2 * pairs * d["num_heads"] * d["head_dim"]
    projections = d["q_tokens"] * compressed_weights(d)
    return 2 * (attention + projections + scoring_products(d, d["entry_pairs"]))


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    # Of the entries, queries may all choose the same.
    seen = smaller(d["kv_tokens"], d["num_seqs"] * d["window"])
    seen = seen + smaller(d["num_entries"], d["selected_pairs"])
    elements = compressed_weights(d) + seen * d["head_dim"] + 2 * d["q_tokens"] * d["hidden"]
    return elements * element_bytes + index_key_bytes(d, d["num_entries"])


_INDEXER_BLOCKS = QueryBlocks(
    pairs="entry_pairs", heads="index_num_heads", head_dim="index_head_dim"
)


def compressed_prefill_dims(
    num_seqs: int, q_len: int, context_len: int, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the batch dims of equal sequences, for a block of these sizes."""
    ratio, kv_len = sizes["compress_ratio"], context_len + q_len
    num_entries = kv_len // ratio if ratio else 0
    limits = (num_entries, sizes["index_topk"] or num_entries)
    pairs = [block_pairs(q_len, context_len, ratio, limit) if ratio else 0 for limit in limits]
    return {
        "num_seqs": num_seqs,
        "q_tokens": num_seqs * q_len,
        "kv_tokens": num_seqs * kv_len,
        "num_entries": num_seqs * num_entries,
        "window_pairs": num_seqs * limited_pairs(q_len, context_len, sizes["window"]),
        "entry_pairs": num_seqs * pairs[0],
        "selected_pairs": num_seqs * pairs[1],
    }


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for sizes in swept_sizes(quick):
        for num_seqs in pick(quick, (1, 2), (1, 4)):
            for q_len in pick(quick, (16, 100), powers_of_two(64, 16384)):
                for cached in pick(quick, (0,), (0, 4096, 65536)):
                    yield {**compressed_prefill_dims(num_seqs, q_len, cached, sizes), **sizes}


SPEC = OperatorSpec(
    name="compressed_attention_prefill_module",
    summary="compressed attention block of new tokens, from hidden state to hidden state",
    group="attention",
    dims=(
        Dim("num_seqs", "sequences in the batch"),
        Dim("q_tokens", "new tokens, summed over sequences"),
        Dim("kv_tokens", "context after this step, summed over sequences"),
        Dim("num_entries", "compressed entries of that context, summed", minimum=0),
        Dim("window_pairs", "query-key pairs inside the window"),
        Dim("entry_pairs", "pairs of a query and a complete entry", minimum=0),
        Dim("selected_pairs", "those of them that the selection leaves", minimum=0),
        *COMPRESSED_DIMS,
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "row_block_waves": lambda d, num_sms: ceil_divide(d["q_tokens"], 128) / num_sms,
        "q_len_mean": lambda d, _: d["q_tokens"] / d["num_seqs"],
        "kv_len_mean": lambda d, _: d["kv_tokens"] / d["num_seqs"],
        "context_len_mean": lambda d, _: (d["kv_tokens"] - d["q_tokens"]) / d["num_seqs"],
        "window_per_query": lambda d, _: d["window_pairs"] / d["q_tokens"],
        "entries_per_query": lambda d, _: d["entry_pairs"] / d["q_tokens"],
        "selected_per_query": lambda d, _: d["selected_pairs"] / d["q_tokens"],
    },
    costs={
        **_INDEXER_BLOCKS.costs(64, "index_"),
        "sequences": lambda d, _: d["num_seqs"],
        "tokens": lambda d, _: d["q_tokens"],
        "token_heads": lambda d, _: d["q_tokens"] * d["num_heads"],
        "token_features": lambda d, _: d["q_tokens"] * d["hidden"],
        "row_blocks": lambda d, _: ceil_divide(d["q_tokens"], 128),
        "context": lambda d, _: d["kv_tokens"],
        "longest": lambda d, _: d["kv_tokens"] / d["num_seqs"],
        "entries": lambda d, _: d["num_entries"],
        "weights": lambda d, _: compressed_weights(d),
        "projections": lambda d, _: d["q_tokens"] * compressed_weights(d),
        "entry_pairs": lambda d, _: d["entry_pairs"],
        "scoring": lambda d, _: scoring_products(d, d["entry_pairs"]),
        "selected_pairs": lambda d, _: d["selected_pairs"],
        "window": lambda d, _: d["window_pairs"] * d["num_heads"],
        # Kernels take heads in groups of 64, whatever there is of them. Source: FlashMLA.
        "padded_attention": lambda d, _: (
            (d["window_pairs"] + d["selected_pairs"]) * ceil_divide(d["num_heads"], 64)
        ),
        "attention": lambda d, _: d["selected_pairs"] * d["num_heads"],
    },
    axes={
        "num_seqs": lambda d, _: d["num_seqs"],
        "q_len_mean": lambda d, _: d["q_tokens"] / d["num_seqs"],
        "context_len_mean": lambda d, _: (d["kv_tokens"] - d["q_tokens"]) / d["num_seqs"],
        **dim_axes("num_heads", "hidden", "compress_ratio"),
    },
    relations=(
        *TOKEN_RELATIONS,
        Relation("selected_pairs", "entry_pairs"),
    ),
    sweep=_sweep,
    num_weights=compressed_weights,
)
