"""Copy every token once for each of its experts, in the order of the experts."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide

ROUTED_DIMS = (
    Dim("num_tokens", "tokens routed"),
    Dim("top_k", "experts per token"),
    Dim("hidden", "features of a token"),
)
# A destination of each pair.
_INDEX_BYTES = 4


def permuted_bytes(d: Dims, element_bytes: float) -> Quantity:
    """Return the bytes of the tokens, of their copies and of the order."""
    rows = d["num_tokens"] * d["top_k"]
    return (d["num_tokens"] + rows) * d["hidden"] * element_bytes + rows * _INDEX_BYTES


def same_traffic(d: Dims) -> tuple[str, Dims]:
    """Return a sum of tensors that moves as many values: three for each it writes."""
    rows = ceil_divide(d["num_tokens"] * (1 + d["top_k"]), 3)
    return "residual_add", {"num_tokens": rows, "hidden": d["hidden"]}


def sweep_routed(quick: bool) -> Iterator[Mapping[str, int]]:
    """Yield token counts for the layers of common models."""
    yield from cross(
        num_tokens=pick(quick, (64, 512), powers_of_two(64, 16384)),
        top_k=pick(quick, (1, 2), (1, 2, 4, 8)),
        hidden=pick(quick, (256, 512), (2048, 4096, 7168)),
    )


SPEC = OperatorSpec(
    name="moe_permute",
    summary="gather the rows of tokens for the experts they go to",
    group="moe",
    dims=ROUTED_DIMS,
    flops=lambda d, _: 0 * d["num_tokens"],
    moved_bytes=permuted_bytes,
    features={"rows_per_sm": lambda d, num_sms: d["num_tokens"] * d["top_k"] / num_sms},
    sweep=sweep_routed,
    # The gradients of a token's copies are added up.
    backward_work_ratio=1.0,
    proxy_operator=same_traffic,
)
