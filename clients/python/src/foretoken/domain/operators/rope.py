"""Rotary position embedding, applied to queries and keys in place."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import HEAD_RELATION, Dim, Dims, OperatorSpec
from foretoken.domain.operators.spec.row import addition_of
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity

# Halves turned, multiplied and put together. Source: GPUModeling's tables of fp16 on A100 (4.7
# times as long forward and 11.2 backward as additions there need for what one kernel moves) and
# GH200 (7.6 and 12.8).
_CHAIN_RATIOS = (6.0, 12.0)


def _elements(d: Dims) -> Quantity:
    return d["num_tokens"] * (d["num_heads"] + d["num_kv_heads"]) * d["head_dim"]


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for num_heads, num_kv_heads in pick_heads(quick):
        for num_tokens in pick(quick, (1, 8, 64, 256, 1024), powers_of_two(1, 32768)):
            yield {
                "num_tokens": num_tokens,
                "num_heads": num_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": 64 if quick else 128,
            }


def pick_heads(quick: bool) -> tuple[tuple[int, int], ...]:
    """Return the (query heads, key heads) pairs of a sweep."""
    return ((8, 4), (4, 2)) if quick else ((8, 1), (16, 4), (32, 8), (32, 32), (64, 8))


SPEC = OperatorSpec(
    name="rope",
    summary="rotate query and key heads by their positions",
    dims=(
        Dim("num_tokens", "rows"),
        Dim("num_heads", "query heads"),
        Dim("num_kv_heads", "key heads"),
        Dim("head_dim", "features of a head"),
    ),
    flops=lambda d, _: 6 * _elements(d),
    moved_bytes=lambda d, element_bytes: 2 * _elements(d) * element_bytes,
    features={
        "rows_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms,
        "heads_ratio": lambda d, _: d["num_heads"] / d["num_kv_heads"],
    },
    relations=(HEAD_RELATION,),
    sweep=_sweep,
    backward_work_ratio=1.0,
    proxy_operator=lambda d: addition_of(2 * 2 * _elements(d)),
    chain_ratios=_CHAIN_RATIOS,
    chain_kernels=(10, 14),
)
