"""What the operators share that stream flat tensors of parameters through memory once."""

from collections.abc import Callable, Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide

# Rows of the sum that stands in: wide enough that its width does not matter.
_WIDTH = 8192
# A sum of two tensors of 16 bit reads two elements and writes one.
_ADDITION_BYTES = 3 * 2


def flat_operator(
    name: str, summary: str, moved_bytes: Callable[[float], float], num_flops: int = 1
) -> OperatorSpec:
    """Return an operator over `num_params` values.

    `moved_bytes` of one value follow from the bytes of an element of the call's number format. In
    16 bit it takes as long as a sum of two tensors that moves as many bytes.
    """

    def sweep(quick: bool) -> Iterator[Mapping[str, int]]:
        sizes = pick(quick, powers_of_two(2**14, 2**24)[::2], powers_of_two(2**16, 2**31))
        yield from cross(num_params=sizes)

    return OperatorSpec(
        name=name,
        summary=summary,
        group="optimizer",
        dims=(Dim("num_params", "values, one per parameter"),),
        flops=lambda d, _: num_flops * d["num_params"],
        moved_bytes=lambda d, element_bytes: moved_bytes(element_bytes) * d["num_params"],
        sweep=sweep,
        proxy_operator=lambda d: addition_of(d["num_params"] * round(moved_bytes(2.0))),
    )


def addition_of(num_bytes: Quantity) -> tuple[str, Dims]:
    """Return the sum of two 16-bit tensors that moves as many bytes."""
    rows = ceil_divide(num_bytes, _ADDITION_BYTES * _WIDTH)
    return "residual_add", {"num_tokens": rows, "hidden": _WIDTH}
