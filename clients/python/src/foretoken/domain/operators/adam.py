"""One AdamW update of a shard of parameters with fp32 master weights."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, OperatorSpec
from foretoken.domain.operators.spec.row import addition_of
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two

# Master weight, two moments: read and written in fp32; gradient read, parameter written.
_STATE_BYTES = 2 * 3 * 4


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_params=pick(
            quick, (*powers_of_two(2**14, 2**24)[::2], 2**25), powers_of_two(2**16, 2**31)
        )
    )


SPEC = OperatorSpec(
    name="adam",
    summary="AdamW step over a flat shard: gradient, two moments, master weight",
    group="optimizer",
    dims=(Dim("num_params", "parameters updated"),),
    flops=lambda d, _: 12 * d["num_params"],
    moved_bytes=lambda d, element_bytes: d["num_params"] * (_STATE_BYTES + 2 * element_bytes),
    sweep=_sweep,
    proxy_operator=lambda d: addition_of(d["num_params"] * (_STATE_BYTES + 4)),
)
