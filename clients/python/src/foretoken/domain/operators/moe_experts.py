"""The expert MLPs of a mixture-of-experts layer: grouped GEMMs over the experts hit."""

from collections.abc import Callable, Iterator, Mapping

from foretoken.domain.operators.spec.operator import (
    Bound,
    Dim,
    Dims,
    FeatureFormula,
    OperatorSpec,
    Relation,
    dim_axes,
)
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide

# The choice of experts, their tokens put in order (2), two products and what quantises before each,
# with the activation between, and the sum. Source: vLLM 0.24, fused_moe/fused_moe.py; SGLang 0.5.9,
# layers/moe/fused_moe_triton.
LAUNCHES_OF_EXPERTS = 9
# Rows of the tiles that grouped GEMM kernels pad an expert's tokens to.
_TILE_ROWS = (16, 64, 128)


def _rows(d: Dims) -> Quantity:
    return d["num_tokens"] * d["top_k"]


def _weights(d: Dims) -> Quantity:
    return 3 * d["hidden"] * d["intermediate"]


def moe_costs(experts: str, num_rows: Callable[[Dims], Quantity]) -> Mapping[str, FeatureFormula]:
    """Return what latency grows with: tokens, experts hit, and the tiles their tokens fill.

    `experts` names the dimension of experts held, `num_rows` counts pairs of token and expert.
    """

    def tiles(d: Dims, rows: int) -> Quantity:
        active = d["num_active_experts"]
        return active * ceil_divide(num_rows(d) / active, rows) * rows

    def wave_cost(rows: int) -> FeatureFormula:
        def cost(d: Dims, num_sms: int) -> Quantity:
            num_tiles = tiles(d, rows) / rows * ceil_divide(2 * d["intermediate"], 128)
            return ceil_divide(num_tiles, num_sms) * rows * 128 * d["hidden"]

        return cost

    def tile_cost(rows: int) -> FeatureFormula:
        return lambda d, _: tiles(d, rows) * d["hidden"] * d["intermediate"]

    return {
        **{f"tiles_{rows}": tile_cost(rows) for rows in _TILE_ROWS},
        **{f"waves_{rows}": wave_cost(rows) for rows in _TILE_ROWS},
        "tokens": lambda d, _: d["num_tokens"],
        "rows": lambda d, _: num_rows(d),
        "inputs": lambda d, _: d["num_tokens"] * d["hidden"],
        "row_inputs": lambda d, _: num_rows(d) * d["hidden"],
        "row_hidden": lambda d, _: num_rows(d) * d["intermediate"],
        "experts": lambda d, _: d[experts],
        "active_experts": lambda d, _: d["num_active_experts"],
        "active_weights": lambda d, _: d["num_active_experts"] * d["hidden"] * d["intermediate"],
        "hidden": lambda d, _: d["hidden"],
        "intermediate": lambda d, _: d["intermediate"],
    }


def hit_ratio(experts: str, num_rows: Callable[[Dims], Quantity]) -> FeatureFormula:
    """Return experts hit over those that as many rows hit on average if routed at random."""

    def ratio(d: Dims, _num_sms: int) -> Quantity:
        expected = d[experts] * (1 - (1 - 1 / d[experts]) ** num_rows(d))
        return d["num_active_experts"] / expected

    return ratio


def expert_layers(quick: bool) -> tuple[tuple[int, int, int, int], ...]:
    """Return (experts, experts per token, model features, expert features) of a sweep.

    Qwen3-30B-A3B, gpt-oss-120b, and Mixtral-8x7B split over 8 ranks. Source: their config.json.
    """
    if quick:
        return ((8, 2, 256, 256),)
    return (128, 8, 2048, 768), (128, 4, 2880, 2880), (8, 2, 4096, 1792)


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    activations = _rows(d) * (2 * d["hidden"] + 3 * d["intermediate"])
    return (d["num_active_experts"] * _weights(d) + activations) * element_bytes


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for num_experts, top_k, hidden, intermediate in expert_layers(quick):
        for num_tokens in pick(quick, (4, 16, 64), powers_of_two(1, 8192)):
            num_rows = num_tokens * top_k
            for num_active in sorted({min(num_experts, num_rows), min(num_experts // 2, num_rows)}):
                yield {
                    "num_tokens": num_tokens,
                    "top_k": top_k,
                    "num_experts": num_experts,
                    "num_active_experts": num_active,
                    "hidden": hidden,
                    "intermediate": intermediate,
                }


SPEC = OperatorSpec(
    name="moe_experts",
    summary="gated MLP of every token in each of its top-k experts",
    group="moe",
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
    costs=moe_costs("num_experts", _rows),
    axes={
        **dim_axes("num_tokens", "top_k", "num_experts", "hidden", "intermediate"),
        "hit_ratio": hit_ratio("num_experts", _rows),
    },
    relations=(
        Relation("num_active_experts", "num_experts"),
        Relation("top_k", "num_experts"),
        Bound("num_active_experts", _rows, "num_tokens times top_k"),
    ),
    sweep=_sweep,
    num_weights=lambda d: d["num_experts"] * _weights(d),
    saved_elements=lambda d: _rows(d) * (d["hidden"] + 3 * d["intermediate"]),
    num_launches=LAUNCHES_OF_EXPERTS,
)
