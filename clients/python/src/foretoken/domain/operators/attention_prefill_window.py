"""Causal attention of new tokens over a sliding window of their context."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_prefill import (
    ATTENTION_COSTS,
    BATCH_AXES,
    BATCH_FEATURES,
    WINDOW_RELATIONS,
    attention_bytes,
    attention_flops,
    head_dims,
    q_block_waves,
    unequal_lengths,
)
from foretoken.domain.operators.spec.operator import (
    HEAD_RELATION,
    Dim,
    OperatorSpec,
    dim_axes,
)
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, smaller


def window_prefill_dims(
    num_seqs: Quantity, q_len: Quantity, window: Quantity
) -> dict[str, Quantity]:
    """Return the batch dims of equal sequences of `q_len` tokens, nothing of them cached.

    Token i sees min(i, window) tokens, itself included.
    """
    in_window = smaller(q_len, window)
    pairs = in_window * (in_window + 1) // 2 + (q_len - in_window) * window
    return {
        "num_seqs": num_seqs,
        "q_tokens": num_seqs * q_len,
        "kv_tokens": num_seqs * q_len,
        "score_pairs": num_seqs * pairs,
        "window": window,
    }


def _unequal_window_dims(num_seqs: int, q_len: int, window: int) -> dict[str, Quantity]:
    """Return the batch dims of unequal sequences of this mean, nothing of them cached."""
    each = [window_prefill_dims(1, length, window) for length in unequal_lengths(num_seqs, q_len)]
    summed = {name: sum(dims[name] for dims in each) for name in each[0]}
    return {**summed, "window": window}


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for heads in ((8, 4, 64),) if quick else ((32, 8, 128), (8, 1, 64)):
        for window in pick(quick, (128,), (128, 1024, 8192)):
            for num_seqs in (1, 4):
                for q_len in pick(quick, (16, 128, 256), powers_of_two(16, 16384)):
                    yield {
                        **window_prefill_dims(num_seqs, q_len, window),
                        **head_dims(*heads),
                    }
    if quick:
        yield {**_unequal_window_dims(4, 128, 128), **head_dims(8, 4, 64)}
        return
    for window in (128, 1024, 8192):
        # Of sequences all longer than the window, the sums do not say how unequal they are.
        for q_len in (window // 2, 2 * window):
            yield {**_unequal_window_dims(4, q_len, window), **head_dims(32, 8, 128)}


SPEC = OperatorSpec(
    name="attention_prefill_window",
    summary="softmax(QK^T)V of new tokens, causal, over a sliding window",
    group="attention",
    dims=(
        Dim("num_seqs", "sequences in the batch"),
        Dim("q_tokens", "new tokens, summed over sequences"),
        Dim("kv_tokens", "context that any new token sees, summed over sequences"),
        Dim("score_pairs", "query-key pairs that neither mask nor window removes"),
        Dim("window", "tokens a query sees, itself included"),
        Dim("num_heads", "query heads"),
        Dim("num_kv_heads", "key and value heads"),
        Dim("head_dim", "features of a head"),
    ),
    # By the pairs and tokens that are left, the same work as without a window.
    flops=attention_flops,
    moved_bytes=attention_bytes,
    features={
        "q_block_waves": q_block_waves,
        "q_len_mean": BATCH_FEATURES["q_len_mean"],
        "pairs_per_query": BATCH_FEATURES["pairs_per_query"],
        "window_fill": lambda d, _: d["score_pairs"] / (d["q_tokens"] * d["window"]),
        "heads_ratio": lambda d, _: d["num_heads"] / d["num_kv_heads"],
    },
    costs=ATTENTION_COSTS,
    axes={**BATCH_AXES, **dim_axes("window", "num_heads", "num_kv_heads", "head_dim")},
    relations=(HEAD_RELATION, *WINDOW_RELATIONS),
    sweep=_sweep,
    # As without a window: scores are recomputed, five matrix products instead of two.
    backward_work_ratio=2.5,
    # Queries, keys and values, as without a window: those of all tokens.
    saved_elements=lambda d: (
        (d["q_tokens"] * d["num_heads"] + 2 * d["kv_tokens"] * d["num_kv_heads"]) * d["head_dim"]
    ),
)
