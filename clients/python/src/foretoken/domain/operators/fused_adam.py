"""One Adam update of a list of tensors in their own number format, without master weights."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two

# Parameter and two moments, read and written, and the gradient, read.
_MOVED_ELEMENTS = 7


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        num_params=pick(quick, powers_of_two(2**14, 2**22)[::2], powers_of_two(2**16, 2**31)),
        num_tensors=pick(quick, (1, 8), (1, 16, 128)),
    )


SPEC = OperatorSpec(
    name="fused_adam",
    summary="Adam step over tensors whose moments have the format of the parameters",
    group="optimizer",
    dims=(
        Dim("num_params", "parameters updated"),
        Dim("num_tensors", "tensors they lie in"),
    ),
    flops=lambda d, _: 12 * d["num_params"],
    moved_bytes=lambda d, element_bytes: _MOVED_ELEMENTS * d["num_params"] * element_bytes,
    features={"params_per_tensor": lambda d, _: d["num_params"] / d["num_tensors"]},
    sweep=_sweep,
)
