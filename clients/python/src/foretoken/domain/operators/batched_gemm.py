"""Many independent matrix products at once, as unfused attention runs them."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two
from foretoken.domain.operators.spec.tile import tile_costs
from foretoken.domain.units import Quantity, ceil_divide


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    return 2 * d["batch"] * d["m"] * d["n"] * d["k"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    of_one = d["m"] * d["k"] + d["k"] * d["n"] + d["m"] * d["n"]
    return d["batch"] * of_one * element_bytes


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    lengths = pick(quick, (64, 256), powers_of_two(128, 4096))
    batches = pick(quick, (1, 8), powers_of_two(1, 256))
    for head_dim in pick(quick, (64,), (64, 128)):
        for length in lengths:
            # The scores, then their product with the values.
            yield from cross(batch=batches, m=(length,), n=(length,), k=(head_dim,))
            yield from cross(batch=batches, m=(length,), n=(head_dim,), k=(length,))


SPEC = OperatorSpec(
    name="batched_gemm",
    summary="C[i,m,n] = A[i,m,k] B[i,k,n] for every i of a batch",
    group="gemm",
    dims=(
        Dim("batch", "matrix products: sequences times heads"),
        Dim("m", "rows of one product"),
        Dim("n", "columns of one product"),
        Dim("k", "the reduced dimension"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        "waves_128x128": lambda d, num_sms: (
            d["batch"] * ceil_divide(d["m"], 128) * ceil_divide(d["n"], 128) / num_sms
        ),
        "tile_m_fill": lambda d, _: d["m"] / (ceil_divide(d["m"], 128) * 128),
        "tile_n_fill": lambda d, _: d["n"] / (ceil_divide(d["n"], 128) * 128),
        "n_alignment": lambda d, _: d["n"] % 64,
        "k_alignment": lambda d, _: d["k"] % 64,
    },
    costs=tile_costs(lambda d: (d["batch"], d["m"], d["n"], d["k"])),
    sweep=_sweep,
    # The gradients of both factors.
    backward_work_ratio=2.0,
    backward_calls=lambda d: (
        {"batch": d["batch"], "m": d["m"], "n": d["k"], "k": d["n"]},
        {"batch": d["batch"], "m": d["k"], "n": d["n"], "k": d["m"]},
    ),
    saved_elements=lambda d: d["batch"] * (d["m"] + d["n"]) * d["k"],
)
