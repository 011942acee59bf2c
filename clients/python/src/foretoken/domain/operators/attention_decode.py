"""Attention of one new token per sequence over its cached context."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_prefill import (
    OTHER_HEADS,
    SWEPT_HEADS,
    head_dims,
)
from foretoken.domain.operators.spec.operator import (
    HEAD_RELATION,
    Bound,
    Dim,
    Dims,
    FeatureFormula,
    OperatorSpec,
    dim_axes,
)
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide

# What makes up a batch of decoding sequences, whatever the kind of attention.
BATCH_DIMS = (
    Dim("num_seqs", "sequences in the batch"),
    Dim("kv_tokens", "context, summed over sequences"),
    Dim("kv_tokens_max", "context of the longest sequence"),
)
BATCH_FEATURES: Mapping[str, FeatureFormula] = {
    "kv_len_mean": lambda d, _: d["kv_tokens"] / d["num_seqs"],
    "raggedness": lambda d, _: d["kv_tokens_max"] * d["num_seqs"] / d["kv_tokens"],
}

BATCH_AXES: Mapping[str, FeatureFormula] = {
    "num_seqs": lambda d, _: d["num_seqs"],
    "kv_len_mean": BATCH_FEATURES["kv_len_mean"],
    "raggedness": BATCH_FEATURES["raggedness"],
}


def decode_relations(
    num_seqs: str = "num_seqs", tokens: str = "kv_tokens", longest: str = "kv_tokens_max"
) -> tuple[Bound, ...]:
    """Return what holds of such dims: exactly then there are contexts with this sum and maximum."""
    return (
        Bound(tokens, lambda d: d[num_seqs] * d[longest], f"{num_seqs} times {longest}"),
        Bound(
            tokens,
            lambda d: d[longest] + d[num_seqs] - 1,
            f"{longest} and a token of every other sequence",
            is_least=True,
        ),
    )


BATCH_RELATIONS = decode_relations()


def kv_block_fill(d: Dims, _num_sms: int) -> Quantity:
    """Return the used part of the longest context's last block of 64 tokens."""
    return d["kv_tokens_max"] / (ceil_divide(d["kv_tokens_max"], 64) * 64)


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    return 4 * d["kv_tokens"] * d["num_heads"] * d["head_dim"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    queries = 2 * d["num_seqs"] * d["num_heads"]
    keys = 2 * d["kv_tokens"] * d["num_kv_heads"]
    return (queries + keys) * d["head_dim"] * element_bytes


def decode_costs(visible: str, longest: FeatureFormula) -> Mapping[str, FeatureFormula]:
    """Return what latency grows with.

    `visible` names the dimension of keys read, summed over sequences; `longest` gives those of the
    longest sequence. One block answers for the queries that share a key head, in groups of 16 as
    tensor cores take them.
    """

    def waves(d: Dims, num_sms: int) -> Quantity:
        return ceil_divide(d["num_seqs"] * d["num_kv_heads"], num_sms)

    def groups(d: Dims) -> Quantity:
        return ceil_divide(d["num_heads"] / d["num_kv_heads"], 16) * d["head_dim"]

    def blocks(d: Dims, num_sms: int) -> Quantity:
        return d["num_seqs"] * d["num_kv_heads"] * ceil_divide(longest(d, num_sms), 64) * 64

    return {
        "sequences": lambda d, _: d["num_seqs"],
        "sequence_kv_heads": lambda d, _: d["num_seqs"] * d["num_kv_heads"],
        "sequence_heads": lambda d, _: d["num_seqs"] * d["num_heads"],
        "queries": lambda d, _: d["num_seqs"] * d["num_heads"] * d["head_dim"],
        "waves": waves,
        "wave_keys": lambda d, num_sms: waves(d, num_sms) * longest(d, num_sms) * d["head_dim"],
        "wave_products": lambda d, num_sms: waves(d, num_sms) * longest(d, num_sms) * groups(d),
        "block_keys": lambda d, num_sms: blocks(d, num_sms) * d["head_dim"],
        "block_products": lambda d, num_sms: blocks(d, num_sms) * groups(d),
        "longest": longest,
        "longest_elements": lambda d, num_sms: longest(d, num_sms) * d["head_dim"],
        "keys": lambda d, _: d["kv_tokens"] * d["num_kv_heads"] * d["head_dim"],
        "visible_tokens": lambda d, _: d[visible],
        # Splitting a sequence in about the square root of its length balances split and merge.
        "splits": lambda d, num_sms: d["num_seqs"] * d["num_kv_heads"] * longest(d, num_sms) ** 0.5,
    }


def decode_dims(num_seqs: int, kv_len: int, raggedness: int = 1) -> dict[str, int]:
    """Return the batch dims of contexts of mean `kv_len`, the longest `raggedness` times as long.

    Of fewer than `raggedness` + 1 sequences only equal ones have such sums.
    """
    return {
        "num_seqs": num_seqs,
        "kv_tokens": num_seqs * kv_len,
        "kv_tokens_max": raggedness * kv_len,
    }


def ragged_decodes(quick: bool) -> Iterator[dict[str, int]]:
    """Yield the batch dims of the ragged batches that a sweep takes along with equal ones."""
    for num_seqs in pick(quick, (16,), (8, 32, 128)):
        for kv_len in pick(quick, (256,), (512, 4096)):
            for raggedness in (2, 4):
                yield decode_dims(num_seqs, kv_len, raggedness)


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for heads in ((8, 4, 64), (4, 2, 64)) if quick else SWEPT_HEADS:
        for num_seqs in pick(quick, (1, 4, 16, 64), powers_of_two(1, 512)):
            for kv_len in pick(quick, (32, 256, 1024), powers_of_two(64, 32768)):
                yield {**decode_dims(num_seqs, kv_len), **head_dims(*heads)}
    for dims in ragged_decodes(quick):
        yield {**dims, **(head_dims(8, 4, 64) if quick else head_dims(32, 8, 128))}
    if quick:
        return
    for raggedness in (2, 4):
        yield {**decode_dims(32, 4096, raggedness), **head_dims(8, 1, 128)}
    for heads in OTHER_HEADS:
        for num_seqs in (1, 16, 64, 256):
            for kv_len in (256, 2048, 16384):
                yield {**decode_dims(num_seqs, kv_len), **head_dims(*heads)}


SPEC = OperatorSpec(
    name="attention_decode",
    summary="softmax(qK^T)V of one query per sequence",
    group="attention",
    dims=(
        *BATCH_DIMS,
        Dim("num_heads", "query heads"),
        Dim("num_kv_heads", "key and value heads"),
        Dim("head_dim", "features of a head"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "blocks_per_sm": lambda d, num_sms: d["num_seqs"] * d["num_kv_heads"] / num_sms,
        **BATCH_FEATURES,
        "kv_block_fill": kv_block_fill,
        "heads_ratio": lambda d, _: d["num_heads"] / d["num_kv_heads"],
    },
    costs=decode_costs("kv_tokens", lambda d, _: d["kv_tokens_max"]),
    axes={**BATCH_AXES, **dim_axes("num_heads", "num_kv_heads", "head_dim")},
    relations=(HEAD_RELATION, *BATCH_RELATIONS),
    sweep=_sweep,
)
