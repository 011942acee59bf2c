"""Attention of an encoder, as over the patches of an image: every token sees its whole sequence."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.attention_prefill import ATTENTION_COSTS
from foretoken.domain.operators.spec.operator import (
    Dim,
    Dims,
    FeatureFormula,
    OperatorSpec,
    Relation,
    dim_axes,
)
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    return 4 * d["score_pairs"] * d["num_heads"] * d["head_dim"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    return 4 * d["num_tokens"] * d["num_heads"] * d["head_dim"] * element_bytes


def _num_blocks(d: Dims, block: int) -> Quantity:
    """Return the blocks of so many tokens in a sequence of mean length."""
    return ceil_divide(d["num_tokens"] / d["num_seqs"], block)


def _wave_costs(block: int) -> Mapping[str, FeatureFormula]:
    """Return what waves of blocks of queries cost that go over blocks of 128 keys, filled up."""

    def waves(d: Dims, num_sms: int) -> Quantity:
        return ceil_divide(_num_blocks(d, block) * d["num_seqs"] * d["num_heads"], num_sms)

    return {
        f"encoder_waves_{block}": waves,
        f"wave_tiles_{block}": lambda d, num_sms: waves(d, num_sms) * _num_blocks(d, 128),
        f"wave_products_{block}": lambda d, num_sms: (
            waves(d, num_sms) * _num_blocks(d, 128) * d["head_dim"]
        ),
    }


# Source: the query tiles of FlashAttention 3 (128, 192) and 4 (256 of two warp groups).
_WAVE_COSTS = {
    **_wave_costs(128),
    **_wave_costs(192),
    **_wave_costs(256),
}


def _as_prefill(cost: FeatureFormula) -> FeatureFormula:
    """Return a cost of causal attention, of as many pairs and with a key head for each head."""

    def cost_of(d: Dims, num_sms: int) -> Quantity:
        tokens, heads = d["num_tokens"], d["num_heads"]
        return cost({**d, "q_tokens": tokens, "kv_tokens": tokens, "num_kv_heads": heads}, num_sms)

    return cost_of


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    lengths = pick(quick, (16, 100, 256), (*powers_of_two(64, 16384), 576, 2304, 9216))
    for num_heads, head_dim in ((2, 64),) if quick else ((16, 72), (16, 64), (4, 80)):
        for num_seqs in pick(quick, (1, 2), (1, 4, 16)):
            for length in lengths:
                yield {
                    "num_seqs": num_seqs,
                    "num_tokens": num_seqs * length,
                    "score_pairs": num_seqs * length * length,
                    "num_heads": num_heads,
                    "head_dim": head_dim,
                }


SPEC = OperatorSpec(
    name="encoder_attention",
    summary="softmax(QK^T)V of whole sequences, nothing masked",
    group="attention",
    dims=(
        Dim("num_seqs", "sequences in the batch"),
        Dim("num_tokens", "tokens, summed over sequences"),
        Dim("score_pairs", "query-key pairs: sum of the squares of the lengths"),
        Dim("num_heads", "heads on this device, each with query, key and value"),
        Dim("head_dim", "features of a head"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "q_block_waves": lambda d, num_sms: (
            ceil_divide(d["num_tokens"], 128) * d["num_heads"] / num_sms
        ),
        "length_mean": lambda d, _: d["num_tokens"] / d["num_seqs"],
        "pairs_per_query": lambda d, _: d["score_pairs"] / d["num_tokens"],
        "block_fill": lambda d, _: d["num_tokens"] / d["num_seqs"] / _num_blocks(d, 128),
        **{name: cost for name, cost in _WAVE_COSTS.items() if name.startswith("encoder_waves")},
    },
    costs={
        **{name: _as_prefill(cost) for name, cost in ATTENTION_COSTS.items()},
        **_WAVE_COSTS,
    },
    axes={
        "num_seqs": lambda d, _: d["num_seqs"],
        "length_mean": lambda d, _: d["num_tokens"] / d["num_seqs"],
        "visible_ratio": lambda d, _: (
            d["score_pairs"] * d["num_seqs"] / d["num_tokens"] / d["num_tokens"]
        ),
        **dim_axes("num_heads", "head_dim"),
    },
    relations=(Relation("num_seqs", "num_tokens"), Relation("num_tokens", "score_pairs")),
    sweep=_sweep,
    # Flash attention recomputes the scores: five matrix products instead of two.
    backward_work_ratio=2.5,
    saved_elements=lambda d: 3 * d["num_tokens"] * d["num_heads"] * d["head_dim"],
)
