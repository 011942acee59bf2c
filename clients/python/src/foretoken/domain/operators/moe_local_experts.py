"""The expert MLPs that one expert-parallel rank holds, for the tokens routed to them.

`moe_experts` is the case of a single rank: there every token's experts are local.
"""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.moe_experts import (
    LAUNCHES_OF_EXPERTS,
    expert_layers,
    hit_ratio,
    moe_costs,
)
from foretoken.domain.operators.spec.operator import (
    Bound,
    Dim,
    Dims,
    OperatorSpec,
    Relation,
    dim_axes,
)
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide, smaller


def _weights(d: Dims) -> Quantity:
    return 3 * d["hidden"] * d["intermediate"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    activations = d["num_local_pairs"] * (2 * d["hidden"] + 3 * d["intermediate"])
    return (d["num_active_experts"] * _weights(d) + activations) * element_bytes


def _load_ratio(d: Dims, _num_sms: int) -> Quantity:
    mean_pairs = d["num_tokens"] * d["top_k"] * d["num_local_experts"] / d["num_experts"]
    return d["num_local_pairs"] / mean_pairs


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for num_experts, top_k, hidden, intermediate in expert_layers(quick):
        # No rank is left without an expert.
        all_ranks = pick(quick, (2,), (2, 8, 32))
        for num_ranks in [count for count in all_ranks if count <= num_experts]:
            num_local = num_experts // num_ranks
            for num_tokens in pick(quick, (4, 16, 64), powers_of_two(1, 8192)):
                num_pairs = ceil_divide(num_tokens * top_k, num_ranks)
                yield {
                    "num_tokens": num_tokens,
                    "top_k": top_k,
                    "num_experts": num_experts,
                    "num_local_experts": num_local,
                    "num_local_pairs": num_pairs,
                    "num_active_experts": min(num_local, num_pairs),
                    "hidden": hidden,
                    "intermediate": intermediate,
                }


SPEC = OperatorSpec(
    name="moe_local_experts",
    summary="gated MLPs of one expert-parallel rank's experts",
    group="moe",
    dims=(
        Dim("num_tokens", "tokens routed, to experts of any rank"),
        Dim("top_k", "experts per token, on any rank"),
        Dim("num_experts", "experts on all ranks"),
        Dim("num_local_experts", "experts on this device"),
        Dim("num_local_pairs", "pairs of a token and one of its experts, on this device"),
        Dim("num_active_experts", "experts on this device that received at least one token"),
        Dim("hidden", "model features"),
        Dim("intermediate", "features inside one expert on this device"),
    ),
    flops=lambda d, _: 2 * d["num_local_pairs"] * _weights(d),
    moved_bytes=_moved_bytes,
    features={
        "tokens_per_expert": lambda d, _: d["num_local_pairs"] / d["num_active_experts"],
        "active_ratio": lambda d, _: d["num_active_experts"] / d["num_local_experts"],
        "load_ratio": _load_ratio,
    },
    costs=moe_costs("num_local_experts", lambda d: d["num_local_pairs"]),
    axes={
        **dim_axes("num_tokens", "top_k", "num_experts", "num_local_experts"),
        **dim_axes("hidden", "intermediate"),
        "load_ratio": _load_ratio,
        "hit_ratio": hit_ratio("num_local_experts", lambda d: d["num_local_pairs"]),
    },
    relations=(
        Relation("top_k", "num_experts"),
        Relation("num_local_experts", "num_experts"),
        Relation("num_active_experts", "num_local_experts"),
        Relation("num_active_experts", "num_local_pairs"),
        Bound(
            "num_local_pairs",
            lambda d: d["num_tokens"] * smaller(d["top_k"], d["num_local_experts"]),
            "as many of every token as it has experts here at most",
        ),
    ),
    sweep=_sweep,
    num_weights=lambda d: d["num_local_experts"] * _weights(d),
    num_launches=LAUNCHES_OF_EXPERTS,
)
