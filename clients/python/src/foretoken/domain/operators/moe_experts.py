"""The expert MLPs of a mixture-of-experts layer: grouped GEMMs over the experts hit."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operator import Dim, Dims, OperatorSpec
from foretoken.domain.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity


def _rows(d: Dims) -> Quantity:
    return d["num_tokens"] * d["top_k"]


def _weights(d: Dims) -> Quantity:
    return 3 * d["hidden"] * d["intermediate"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    activations = _rows(d) * (2 * d["hidden"] + 3 * d["intermediate"])
    return (d["num_active_experts"] * _weights(d) + activations) * element_bytes


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    num_experts, top_k = (8, 2) if quick else (128, 8)
    for num_tokens in pick(quick, (4, 16, 64), powers_of_two(1, 8192)):
        num_rows = num_tokens * top_k
        for num_active in sorted({min(num_experts, num_rows), min(num_experts // 2, num_rows)}):
            yield {
                "num_tokens": num_tokens,
                "top_k": top_k,
                "num_experts": num_experts,
                "num_active_experts": num_active,
                "hidden": 256 if quick else 2048,
                "intermediate": 256 if quick else 768,
            }


SPEC = OperatorSpec(
    name="moe_experts",
    summary="gated MLP of every token in each of its top-k experts",
    dims=(
        Dim("num_tokens", "tokens routed"),
        Dim("top_k", "experts per token"),
        Dim("num_experts", "experts on this device"),
        Dim("num_active_experts", "experts that received at least one token"),
        Dim("hidden", "model features"),
        Dim("intermediate", "features inside one expert"),
    ),
    flops=lambda d, _: 2 * _rows(d) * _weights(d),
    moved_bytes=_moved_bytes,
    features={
        "tokens_per_expert": lambda d, _: _rows(d) / d["num_active_experts"],
        "active_ratio": lambda d, _: d["num_active_experts"] / d["num_experts"],
    },
    sweep=_sweep,
    num_weights=lambda d: d["num_experts"] * _weights(d),
    saved_elements=lambda d: _rows(d) * (d["hidden"] + 3 * d["intermediate"]),
)
