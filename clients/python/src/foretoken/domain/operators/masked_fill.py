"""Overwrite the masked scores of unfused attention, in place."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two
from foretoken.domain.units import Quantity


def _elements(d: Dims) -> Quantity:
    return d["num_matrices"] * d["q_len"] * d["kv_len"]


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    for length in pick(quick, (64, 512), powers_of_two(128, 4096)):
        yield from cross(
            num_matrices=pick(quick, (1, 8, 32), powers_of_two(1, 512)),
            q_len=(length,),
            kv_len=(length,),
        )


SPEC = OperatorSpec(
    name="masked_fill",
    summary="x = value where the mask holds, one mask for all score matrices",
    dims=(
        Dim("num_matrices", "score matrices: sequences times heads"),
        Dim("q_len", "queries of one"),
        Dim("kv_len", "keys of one"),
    ),
    flops=lambda d, _: _elements(d),
    moved_bytes=lambda d, element_bytes: (
        2 * _elements(d) * element_bytes + d["q_len"] * d["kv_len"]
    ),
    features={"rows_per_sm": lambda d, num_sms: d["num_matrices"] * d["q_len"] / num_sms},
    sweep=_sweep,
    backward_work_ratio=1.0,
    # The mask, one byte an element, is shared; it is not counted.
)
