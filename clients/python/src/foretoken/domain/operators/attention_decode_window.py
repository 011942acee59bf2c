"""Attention of one new token per sequence over a sliding window of its cached context."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_decode import (
    BATCH_AXES,
    BATCH_RELATIONS,
    decode_costs,
    kv_block_fill,
)
from foretoken.domain.operators.attention_prefill import head_dims, unequal_lengths
from foretoken.domain.operators.spec.operator import (
    HEAD_RELATION,
    Bound,
    Dim,
    Dims,
    OperatorSpec,
    dim_axes,
)
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, smaller


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    return 4 * d["visible_tokens"] * d["num_heads"] * d["head_dim"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    queries = 2 * d["num_seqs"] * d["num_heads"]
    keys = 2 * d["visible_tokens"] * d["num_kv_heads"]
    return (queries + keys) * d["head_dim"] * element_bytes


def _window_dims(window: int, *kv_lens: int) -> dict[str, int]:
    """Return the batch dims of these contexts."""
    return {
        "num_seqs": len(kv_lens),
        "kv_tokens": sum(kv_lens),
        "kv_tokens_max": max(kv_lens),
        "visible_tokens": sum(min(kv_len, window) for kv_len in kv_lens),
        "window": window,
    }


def most_visible(d: Dims) -> Quantity:
    """Return the visible tokens of the longest sequence and of others that are equally long."""
    in_window = smaller(d["kv_tokens_max"], d["window"])
    others = smaller(d["kv_tokens"] - d["kv_tokens_max"], (d["num_seqs"] - 1) * d["window"])
    return in_window + others


def _fewest_visible(d: Dims) -> Quantity:
    """Return a bound from below: all sequences in as much of the window as the longest."""
    unseen = d["kv_tokens_max"] - smaller(d["kv_tokens_max"], d["window"])
    return d["kv_tokens"] - d["kv_tokens"] * unseen // d["kv_tokens_max"]


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for heads in ((8, 4, 64),) if quick else ((32, 8, 128), (8, 1, 64)):
        for window in pick(quick, (128,), (128, 1024, 8192)):
            for num_seqs in pick(quick, (1, 8), powers_of_two(1, 512)):
                for kv_len in pick(quick, (32, 256, 1024), powers_of_two(64, 32768)):
                    dims = _window_dims(window, *(kv_len,) * num_seqs)
                    yield {**dims, **head_dims(*heads)}
    if quick:
        yield {**_window_dims(128, *unequal_lengths(8, 128)), **head_dims(8, 4, 64)}
        return
    for window in (128, 1024, 8192):
        for num_seqs in (16, 128):
            dims = _window_dims(window, *unequal_lengths(num_seqs, window))
            yield {**dims, **head_dims(32, 8, 128)}


SPEC = OperatorSpec(
    name="attention_decode_window",
    summary="softmax(qK^T)V of one query per sequence over a sliding window",
    group="attention",
    dims=(
        Dim("num_seqs", "sequences in the batch"),
        Dim("kv_tokens", "context, summed over sequences, inside the window or not"),
        Dim("kv_tokens_max", "context of the longest sequence"),
        Dim("visible_tokens", "context inside the window, summed over sequences"),
        Dim("window", "tokens a query sees, itself included"),
        Dim("num_heads", "query heads"),
        Dim("num_kv_heads", "key and value heads"),
        Dim("head_dim", "features of a head"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "blocks_per_sm": lambda d, num_sms: d["num_seqs"] * d["num_kv_heads"] / num_sms,
        "visible_len_mean": lambda d, _: d["visible_tokens"] / d["num_seqs"],
        "visible_ratio": lambda d, _: d["visible_tokens"] / d["kv_tokens"],
        "kv_block_fill": kv_block_fill,
        "heads_ratio": lambda d, _: d["num_heads"] / d["num_kv_heads"],
    },
    costs=decode_costs("visible_tokens", lambda d, _: smaller(d["kv_tokens_max"], d["window"])),
    axes={**BATCH_AXES, **dim_axes("window", "num_heads", "num_kv_heads", "head_dim")},
    relations=(
        HEAD_RELATION,
        *BATCH_RELATIONS,
        Bound("visible_tokens", most_visible, "what the windows of such contexts hold"),
        Bound(
            "visible_tokens",
            _fewest_visible,
            "the least that the windows of such contexts hold",
            is_least=True,
        ),
    ),
    sweep=_sweep,
)
