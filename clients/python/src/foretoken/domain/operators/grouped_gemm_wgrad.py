"""The weight gradient of a grouped GEMM: the rows of every group are the reduced dimension."""

from foretoken.domain.operators.grouped_gemm import (
    GROUPED_DIMS,
    GROUPED_FEATURES,
    grouped_flops,
    sweep_groups,
)
from foretoken.domain.operators.spec.operator import Dims, OperatorSpec
from foretoken.domain.units import Quantity, ceil_divide

# A gradient is read, added to and written in fp32.
_SUM_BYTES = 8


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    rows = d["m"] * (d["k"] + d["n"]) * element_bytes
    return rows + d["num_groups"] * d["n"] * d["k"] * _SUM_BYTES


SPEC = OperatorSpec(
    name="grouped_gemm_wgrad",
    summary="B'[i] = A[i]^T C'[i] for every group i of rows, accumulated in fp32",
    group="moe",
    dims=GROUPED_DIMS,
    flops=grouped_flops,
    moved_bytes=_moved_bytes,
    features=GROUPED_FEATURES,
    sweep=sweep_groups,
    # The products of all groups next to each other, each over the rows of one.
    proxy_operator=lambda d: (
        "gemm",
        {"m": d["num_groups"] * d["n"], "n": d["k"], "k": ceil_divide(d["m"], d["num_groups"])},
    ),
)
