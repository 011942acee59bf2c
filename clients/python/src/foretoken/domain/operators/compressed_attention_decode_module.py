"""The whole compressed attention block of DeepSeek-V4 for one new token per sequence."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_decode import (
    BATCH_AXES,
    BATCH_DIMS,
    BATCH_FEATURES,
    BATCH_RELATIONS,
    decode_dims,
)
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
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    seen = d["window_tokens"] + d["selected_entries"]
    attention = 2 * seen * d["num_heads"] * d["head_dim"]
    projections = d["num_seqs"] * compressed_weights(d)
    return 2 * (attention + projections + scoring_products(d, d["num_entries"]))


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    cache = (d["window_tokens"] + d["selected_entries"]) * d["head_dim"]
    elements = compressed_weights(d) + cache + 2 * d["num_seqs"] * d["hidden"]
    return elements * element_bytes + index_key_bytes(d, d["num_entries"])


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for sizes in swept_sizes(quick):
        ratio = sizes["compress_ratio"]
        for num_seqs in pick(quick, (1, 8), powers_of_two(1, 512)):
            for kv_len in pick(quick, (32, 256), powers_of_two(64, 131072)):
                entries = kv_len // ratio if ratio else 0
                selected = min(entries, sizes["index_topk"] or entries)
                yield {
                    **decode_dims(num_seqs, kv_len),
                    "num_entries": num_seqs * entries,
                    "window_tokens": num_seqs * min(kv_len, sizes["window"]),
                    "selected_entries": num_seqs * selected,
                    **sizes,
                }


SPEC = OperatorSpec(
    name="compressed_attention_decode_module",
    summary="compressed attention block of one token per sequence, hidden state to hidden state",
    group="attention",
    dims=(
        *BATCH_DIMS,
        Dim("num_entries", "compressed entries of that context, summed", minimum=0),
        Dim("window_tokens", "context inside the window, summed over sequences"),
        Dim("selected_entries", "entries that the selection leaves, summed", minimum=0),
        *COMPRESSED_DIMS,
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "row_block_waves": lambda d, num_sms: ceil_divide(d["num_seqs"], 64) / num_sms,
        **BATCH_FEATURES,
        "entries_per_query": lambda d, _: d["num_entries"] / d["num_seqs"],
        "selected_per_query": lambda d, _: d["selected_entries"] / d["num_seqs"],
    },
    costs={
        "sequences": lambda d, _: d["num_seqs"],
        "sequence_heads": lambda d, _: d["num_seqs"] * d["num_heads"],
        "longest": lambda d, _: d["kv_tokens_max"],
        "weights": lambda d, _: compressed_weights(d),
        "entries": lambda d, _: d["num_entries"],
        "scoring": lambda d, _: scoring_products(d, d["num_entries"]),
        "selected": lambda d, _: d["selected_entries"],
        "window": lambda d, _: d["window_tokens"] * d["num_heads"],
        "attention": lambda d, _: d["selected_entries"] * d["num_heads"],
    },
    axes={**BATCH_AXES, **dim_axes("num_heads", "hidden", "compress_ratio")},
    relations=(
        *BATCH_RELATIONS,
        Relation("window_tokens", "kv_tokens"),
        Relation("selected_entries", "num_entries"),
    ),
    sweep=_sweep,
    num_weights=compressed_weights,
)
