"""Causal attention of new tokens over their context, possibly a ragged batch."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import (
    HEAD_RELATION,
    Bound,
    Dim,
    Dims,
    FeatureFormula,
    OperatorSpec,
    Relation,
    dim_axes,
)
from foretoken.domain.operators.spec.query_blocks import QueryBlocks
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide

# What makes up a batch of prefills, whatever the kind of attention.
BATCH_DIMS = (
    Dim("num_seqs", "sequences in the batch"),
    Dim("q_tokens", "new tokens, summed over sequences"),
    Dim("kv_tokens", "context after this step, summed over sequences"),
    Dim("score_pairs", "query-key pairs not masked: sum of q * context + q * (q + 1) / 2"),
)
BATCH_FEATURES: Mapping[str, FeatureFormula] = {
    "q_len_mean": lambda d, _: d["q_tokens"] / d["num_seqs"],
    "context_ratio": lambda d, _: d["kv_tokens"] / d["q_tokens"],
    "pairs_per_query": lambda d, _: d["score_pairs"] / d["q_tokens"],
}

BATCH_AXES: Mapping[str, FeatureFormula] = {
    "num_seqs": lambda d, _: d["num_seqs"],
    "q_len_mean": BATCH_FEATURES["q_len_mean"],
    "context_len_mean": lambda d, _: (d["kv_tokens"] - d["q_tokens"]) / d["num_seqs"],
    # The share of its sequence that a query sees; for a given batch, how ragged it is.
    "visible_ratio": lambda d, _: d["score_pairs"] * d["num_seqs"] / d["q_tokens"] / d["kv_tokens"],
}


def _most_pairs(d: Dims) -> Quantity:
    """Return the pairs where one sequence has all tokens but one of every other, unmasked."""
    others = d["num_seqs"] - 1
    return (d["q_tokens"] - others) * (d["kv_tokens"] - others) + others


def _fewest_pairs(d: Dims) -> Quantity:
    """Return a bound from below: equal new tokens, all context before a sequence of one of them."""
    length, num_longer = d["q_tokens"] // d["num_seqs"], d["q_tokens"] % d["num_seqs"]
    new = d["num_seqs"] * (length * (length + 1) // 2) + num_longer * (length + 1)
    # A sequence on its own has all of the new tokens behind it.
    after = 1 + (d["num_seqs"] == 1) * (d["q_tokens"] - 1)
    return new + (d["kv_tokens"] - d["q_tokens"]) * after


TOKEN_RELATIONS = (Relation("num_seqs", "q_tokens"), Relation("q_tokens", "kv_tokens"))
_MOST_PAIRS = Bound("score_pairs", _most_pairs, "all that so many tokens can have")
# Blocks of a ring are not causal: a query may see all keys of its sequence.
BATCH_RELATIONS = (
    *TOKEN_RELATIONS,
    _MOST_PAIRS,
    Bound("score_pairs", _fewest_pairs, "the fewest that so many tokens have", is_least=True),
)
# Behind a window, whose own token is new, a query sees no more than its width.
WINDOW_RELATIONS = (
    *TOKEN_RELATIONS,
    Bound(
        "kv_tokens",
        lambda d: d["q_tokens"] + d["num_seqs"] * (d["window"] - 1),
        "the new tokens and a window less one before each sequence",
    ),
    _MOST_PAIRS,
    Bound("score_pairs", lambda d: d["q_tokens"] * d["window"], "q_tokens times window"),
    Bound("score_pairs", lambda d: d["kv_tokens"], "one of each token that is seen", is_least=True),
)


def prefill_dims(num_seqs: Quantity, q_len: Quantity, context_len: Quantity) -> dict[str, Quantity]:
    """Return the batch dims of equal sequences: `q_len` new tokens after `context_len` cached."""
    return {
        "num_seqs": num_seqs,
        "q_tokens": num_seqs * q_len,
        "kv_tokens": num_seqs * (context_len + q_len),
        "score_pairs": num_seqs * (q_len * context_len + q_len * (q_len + 1) // 2),
    }


# Lengths of four sequences of one batch, in eighths of their mean.
_UNEQUAL_EIGHTHS = (1, 3, 8, 20)


def unequal_lengths(num_seqs: int, mean: int) -> tuple[int, ...]:
    """Return lengths of a ragged batch with about that mean, the longest 2.5 times as long.

    `num_seqs` is a multiple of 4, `mean` of 8 for the mean to be exact.
    """
    lengths = tuple(max(eighths * mean // 8, 1) for eighths in _UNEQUAL_EIGHTHS)
    return lengths * (num_seqs // len(lengths))


def unequal_prefill_dims(num_seqs: int, q_len: int, context_len: int) -> dict[str, int]:
    """Return the batch dims of unequal sequences with these means, a multiple of four of them.

    The longer what is cached, the shorter what is new, as turns of a chat compared with new
    prompts.
    """
    q_lens = unequal_lengths(num_seqs, q_len)
    contexts = unequal_lengths(num_seqs, context_len)[::-1] if context_len else (0,) * num_seqs
    pairs = zip(q_lens, contexts, strict=True)
    return {
        "num_seqs": num_seqs,
        "q_tokens": sum(q_lens),
        "kv_tokens": sum(q_lens) + sum(contexts),
        "score_pairs": sum(new * old + new * (new + 1) // 2 for new, old in pairs),
    }


def q_block_waves(d: Dims, num_sms: int) -> Quantity:
    """Return how often the device is filled by blocks of 128 queries of a head."""
    return ceil_divide(d["q_tokens"], 128) * d["num_heads"] / num_sms


def attention_flops(d: Dims, _element_bytes: float) -> Quantity:
    """Return the operations of both matrix products over the pairs not masked."""
    return 4 * d["score_pairs"] * d["num_heads"] * d["head_dim"]


def attention_bytes(d: Dims, element_bytes: float) -> Quantity:
    """Return the bytes of queries, outputs, keys and values."""
    queries = 2 * d["q_tokens"] * d["num_heads"]
    keys = 2 * d["kv_tokens"] * d["num_kv_heads"]
    return (queries + keys) * d["head_dim"] * element_bytes


# Source: the block sizes that FlashAttention 2 and 3 and FlashInfer choose among.
ATTENTION_COSTS: Mapping[str, FeatureFormula] = {
    **QueryBlocks().costs(64),
    **QueryBlocks().costs(128),
    "sequences": lambda d, _: d["num_seqs"],
    "sequence_heads": lambda d, _: d["num_seqs"] * d["num_heads"],
    "tokens": lambda d, _: d["q_tokens"],
    "query_heads": lambda d, _: d["q_tokens"] * d["num_heads"],
    "queries": lambda d, _: d["q_tokens"] * d["num_heads"] * d["head_dim"],
    "keys": lambda d, _: d["kv_tokens"] * d["num_kv_heads"] * d["head_dim"],
    "longest": lambda d, _: d["score_pairs"] / d["q_tokens"],
    "longest_elements": lambda d, _: d["score_pairs"] / d["q_tokens"] * d["head_dim"],
}


def head_dims(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return the dims of heads."""
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


# Heads of a rank, measured closely; and those of Llama-3.1-8B and 70B, Qwen3-32B and 30B-A3B under
# tensor parallelism of 1 to 8 that are left, at fewer points.
SWEPT_HEADS = ((32, 8, 128), (32, 32, 128), (8, 1, 128))
OTHER_HEADS = (
    (64, 8, 128),
    (32, 4, 128),
    (16, 4, 128),
    (16, 2, 128),
    (8, 2, 128),
    (4, 1, 128),
)


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for heads in ((8, 4, 64), (4, 2, 64)) if quick else SWEPT_HEADS:
        for num_seqs in (1, 4):
            for q_len in pick(quick, (16, 128, 512), powers_of_two(16, 16384)):
                for context_len in pick(quick, (0, 128, 512), (0, *powers_of_two(64, 16384))):
                    yield {**prefill_dims(num_seqs, q_len, context_len), **head_dims(*heads)}
    yield from _unequal_sweep(quick)
    if not quick:
        for heads in OTHER_HEADS:
            for q_len in (128, 1024, 8192):
                for context_len in (0, 4096):
                    yield {**prefill_dims(1, q_len, context_len), **head_dims(*heads)}


def _unequal_sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    if quick:
        for context_len in (0, 128):
            yield {**unequal_prefill_dims(4, 128, context_len), **head_dims(8, 4, 64)}
        return
    for q_len in (64, 512, 2048):
        for context_len in (0, 1024, 8192):
            yield {**unequal_prefill_dims(4, q_len, context_len), **head_dims(32, 8, 128)}
    for context_len in (0, 1024):
        yield {**unequal_prefill_dims(16, 128, context_len), **head_dims(32, 8, 128)}
        yield {**unequal_prefill_dims(4, 512, context_len), **head_dims(8, 1, 128)}


SPEC = OperatorSpec(
    name="attention_prefill",
    summary="softmax(QK^T)V of new tokens, causal, with cached context",
    group="attention",
    dims=(
        *BATCH_DIMS,
        Dim("num_heads", "query heads"),
        Dim("num_kv_heads", "key and value heads"),
        Dim("head_dim", "features of a head"),
    ),
    flops=attention_flops,
    moved_bytes=attention_bytes,
    features={
        "q_block_waves": q_block_waves,
        **BATCH_FEATURES,
        "heads_ratio": lambda d, _: d["num_heads"] / d["num_kv_heads"],
    },
    costs=ATTENTION_COSTS,
    axes={**BATCH_AXES, **dim_axes("num_heads", "num_kv_heads", "head_dim")},
    relations=(HEAD_RELATION, *BATCH_RELATIONS),
    sweep=_sweep,
    # Flash attention recomputes the scores: five matrix products instead of two.
    backward_work_ratio=2.5,
    # Queries, keys and values; the output is the input of the projection after it.
    saved_elements=lambda d: (
        (d["q_tokens"] * d["num_heads"] + 2 * d["kv_tokens"] * d["num_kv_heads"]) * d["head_dim"]
    ),
)
