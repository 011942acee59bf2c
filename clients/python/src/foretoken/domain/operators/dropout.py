"""Dropout by a kernel of its own; the mask is kept, one byte a value."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two
from foretoken.domain.units import Quantity


def _values(d: Dims) -> Quantity:
    return d["num_tokens"] * d["hidden"]


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_tokens=pick(quick, (1, 32, 1024), powers_of_two(1, 32768)),
        hidden=pick(quick, (512, 1024), powers_of_two(256, 32768)),
    )


SPEC = OperatorSpec(
    name="dropout",
    summary="y = x * mask / (1 - p), with a random mask",
    dims=(Dim("num_tokens", "rows"), Dim("hidden", "features")),
    flops=lambda d, _: 2 * _values(d),
    moved_bytes=lambda d, element_bytes: _values(d) * (2 * element_bytes + 1),
    features={"rows_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms},
    sweep=_sweep,
    backward_work_ratio=1.0,
    # Half an element of 16 bit.
    saved_elements=lambda d: _values(d) / 2,
    proxy_operator=lambda d: ("residual_add", d),
)
