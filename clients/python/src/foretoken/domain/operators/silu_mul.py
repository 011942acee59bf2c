"""Gated activation of SwiGLU MLPs."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operator import Dim, Dims, OperatorSpec
from foretoken.domain.sweep import cross, pick, powers_of_two
from foretoken.domain.units import Quantity


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    return 5 * d["num_tokens"] * d["intermediate"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    return 3 * d["num_tokens"] * d["intermediate"] * element_bytes


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_tokens=pick(quick, (1, 8, 64, 256, 1024), powers_of_two(1, 32768)),
        intermediate=pick(quick, (704, 1408), (*powers_of_two(256, 32768), 3584, 11008, 14336)),
    )


SPEC = OperatorSpec(
    name="silu_mul",
    summary="y = silu(gate) * up, from one [tokens, 2*intermediate] input",
    dims=(
        Dim("num_tokens", "rows"),
        Dim("intermediate", "features of the output"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "rows_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms,
        "width_alignment": lambda d, _: d["intermediate"] % 1024,
    },
    sweep=_sweep,
    backward_work_ratio=1.67,
    saved_elements=lambda d: 2 * d["num_tokens"] * d["intermediate"],
)
