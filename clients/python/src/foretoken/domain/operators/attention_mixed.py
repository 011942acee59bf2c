"""One attention kernel over a batch that holds both prefill chunks and decoding sequences."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_decode import decode_relations
from foretoken.domain.operators.attention_prefill import (
    BATCH_RELATIONS,
    head_dims,
    prefill_dims,
    unequal_prefill_dims,
)
from foretoken.domain.operators.spec.operator import (
    HEAD_RELATION,
    Dim,
    Dims,
    OperatorSpec,
)
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    return 4 * (d["score_pairs"] + d["decode_kv_tokens"]) * d["num_heads"] * d["head_dim"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    queries = 2 * (d["q_tokens"] + d["num_decode_seqs"]) * d["num_heads"]
    keys = 2 * (d["kv_tokens"] + d["decode_kv_tokens"]) * d["num_kv_heads"]
    return (queries + keys) * d["head_dim"] * element_bytes


def _decodes(num_seqs: int, kv_len: int, raggedness: int = 1) -> dict[str, int]:
    """Return the dims of the decodes, the longest context `raggedness` times the mean."""
    return {
        "num_decode_seqs": num_seqs,
        "decode_kv_tokens": num_seqs * kv_len,
        "decode_kv_tokens_max": raggedness * kv_len,
    }


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    heads = head_dims(8, 4, 64) if quick else head_dims(32, 8, 128)
    for q_len in pick(quick, (64,), powers_of_two(64, 4096)):
        for num_seqs in pick(quick, (4, 16), powers_of_two(1, 256)):
            for kv_len in pick(quick, (128, 512), powers_of_two(128, 8192)):
                yield {**prefill_dims(1, q_len, 0), **_decodes(num_seqs, kv_len), **heads}
    if quick:
        yield {**prefill_dims(1, 64, 256), **_decodes(16, 128, 4), **heads}
        return
    for q_len in (128, 512, 2048):
        for num_seqs in (16, 128):
            decodes = _decodes(num_seqs, 1024, 4)
            yield {**prefill_dims(1, q_len, 0), **decodes, **heads}
            yield {**prefill_dims(1, q_len, 4096), **decodes, **heads}
            yield {**unequal_prefill_dims(4, q_len // 4, 0), **decodes, **heads}


SPEC = OperatorSpec(
    name="attention_mixed",
    summary="prefill chunks and decoding sequences in one variable-length kernel",
    group="attention",
    dims=(
        Dim("num_seqs", "prefilling sequences"),
        Dim("q_tokens", "new prefill tokens, summed"),
        Dim("kv_tokens", "context of prefilling sequences after this step, summed"),
        Dim("score_pairs", "unmasked query-key pairs of the prefills"),
        Dim("num_decode_seqs", "decoding sequences"),
        Dim("decode_kv_tokens", "context of decoding sequences, summed"),
        Dim("decode_kv_tokens_max", "context of the longest decoding sequence"),
        Dim("num_heads", "query heads"),
        Dim("num_kv_heads", "key and value heads"),
        Dim("head_dim", "features of a head"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "decode_ratio": lambda d, _: (
            d["decode_kv_tokens"] / (d["score_pairs"] + d["decode_kv_tokens"])
        ),
        "blocks_per_sm": lambda d, num_sms: d["num_decode_seqs"] * d["num_kv_heads"] / num_sms,
        "pairs_per_query": lambda d, _: d["score_pairs"] / d["q_tokens"],
        "heads_ratio": lambda d, _: d["num_heads"] / d["num_kv_heads"],
    },
    relations=(
        HEAD_RELATION,
        *BATCH_RELATIONS,
        *decode_relations("num_decode_seqs", "decode_kv_tokens", "decode_kv_tokens_max"),
    ),
    sweep=_sweep,
)
