"""Softmax over the last dimension, as unfused attention runs it over whole rows of scores."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_rows=pick(quick, (64, 1024, 8192), powers_of_two(256, 524288)),
        width=pick(quick, (128, 1024), powers_of_two(128, 8192)),
    )


SPEC = OperatorSpec(
    name="softmax",
    summary="y = exp(x - max) / sum, row by row",
    dims=(Dim("num_rows", "rows: sequences times heads times queries"), Dim("width", "row length")),
    flops=lambda d, _: 5 * d["num_rows"] * d["width"],
    moved_bytes=lambda d, element_bytes: 2 * d["num_rows"] * d["width"] * element_bytes,
    features={
        "rows_per_sm": lambda d, num_sms: d["num_rows"] / num_sms,
        "width_alignment": lambda d, _: d["width"] % 1024,
    },
    sweep=_sweep,
    # Reads the result and its gradient, writes one.
    backward_work_ratio=1.5,
    saved_elements=lambda d: d["num_rows"] * d["width"],
)
