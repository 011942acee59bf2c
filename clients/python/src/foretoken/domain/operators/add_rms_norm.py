"""Residual addition and RMS normalisation in one kernel, as vLLM and SGLang run them."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operator import Dim, Dims, OperatorSpec
from foretoken.domain.sweep import cross, pick, powers_of_two
from foretoken.domain.units import Quantity


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    return 5 * d["num_tokens"] * d["hidden"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    return (4 * d["num_tokens"] * d["hidden"] + d["hidden"]) * element_bytes


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_tokens=pick(quick, (1, 32, 1024), powers_of_two(1, 32768)),
        hidden=pick(quick, (512, 1024), (*powers_of_two(256, 32768), 3584, 11008, 14336)),
    )


SPEC = OperatorSpec(
    name="add_rms_norm",
    summary="residual += x; y = residual / rms(residual) * weight",
    dims=(
        Dim("num_tokens", "rows"),
        Dim("hidden", "features normalised together"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "rows_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms,
        "width_alignment": lambda d, _: d["hidden"] % 1024,
    },
    sweep=_sweep,
    backward_work_ratio=2.0,
    num_weights=lambda d: d["hidden"],
    saved_elements=lambda d: d["num_tokens"] * d["hidden"],
)
