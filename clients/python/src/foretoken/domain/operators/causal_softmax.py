"""Softmax of square score matrices under the causal mask, scaled, in one kernel."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two
from foretoken.domain.units import Quantity


def _visible(d: Dims) -> Quantity:
    return d["num_matrices"] * (d["length"] * (d["length"] + 1) // 2)


def _elements(d: Dims) -> Quantity:
    return d["num_matrices"] * d["length"] * d["length"]


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_matrices=pick(quick, (1, 8, 32), powers_of_two(1, 512)),
        length=pick(quick, (64, 256), powers_of_two(128, 4096)),
    )


SPEC = OperatorSpec(
    name="causal_softmax",
    summary="softmax of scale * x over the keys up to each query; the rest becomes 0",
    dims=(
        Dim("num_matrices", "score matrices: sequences times heads"),
        Dim("length", "queries, and keys, of one"),
    ),
    flops=lambda d, _: 6 * _visible(d),
    # Only the visible half is read; all of the result is written.
    moved_bytes=lambda d, element_bytes: (_visible(d) + _elements(d)) * element_bytes,
    features={
        "rows_per_sm": lambda d, num_sms: d["num_matrices"] * d["length"] / num_sms,
        "length_alignment": lambda d, _: d["length"] % 1024,
    },
    sweep=_sweep,
    # Reads half of the result and half of its gradient, writes all: 2 over 1.5.
    backward_work_ratio=1.33,
    saved_elements=_elements,
)
