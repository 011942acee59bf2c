"""Low-rank matrix product in which every row has the matrix of its own adapter.

Engines run two for a linear layer: into the rank (shrink) and out of it (expand).
Source: Punica (Chen et al., 2023); vLLM, `lora/ops/triton_ops`.
"""

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec, Relation
from foretoken.domain.units import Quantity


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    return 2 * d["m"] * d["n"] * d["k"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    return (d["m"] * (d["k"] + d["n"]) + d["num_active"] * d["n"] * d["k"]) * element_bytes


def _dense(d: Dims) -> tuple[str, Dims]:
    """Return the plain product of as many FLOPs and bytes.

    Its m and n have the product of the rows and features here, and the sum of the rows and the
    features of all matrices: the two roots of x^2 - sum x + product.
    """
    rows, columns = d["m"], d["num_active"] * d["n"]
    total, product = rows + columns, d["m"] * d["n"]
    large = (total + (total * total - 4.0 * product) ** 0.5) / 2
    has_more_rows = (rows >= columns) * 1
    large, small = _whole(large), _whole(product / large)
    m = has_more_rows * large + (1 - has_more_rows) * small
    return "gemm", {"m": m, "n": large + small - m, "k": d["k"]}


def _whole(value: Quantity) -> Quantity:
    """Return the nearest whole number of at least 1, as an integer."""
    whole = (value + 0.5) // 1
    whole = whole + (whole < 1) * 1
    return whole.astype("int64") if hasattr(whole, "astype") else int(whole)


SPEC = OperatorSpec(
    name="lora_gemm",
    summary="y[i] = x[i] W[a(i)], W of the adapter a(i) of row i, accumulated in fp32",
    group="lora",
    dims=(
        Dim("num_slots", "matrices held, one for each adapter that is loaded"),
        Dim("num_active", "matrices that any row uses"),
        Dim("m", "rows of the activation"),
        Dim("n", "output features"),
        Dim("k", "input features, the reduced dimension"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={"rows_per_matrix": lambda d, _: d["m"] / d["num_active"]},
    relations=(Relation("num_active", "num_slots"), Relation("num_active", "m")),
    sweep=lambda _: (),
    num_weights=lambda d: d["num_slots"] * d["n"] * d["k"],
    proxy_operator=_dense,
)
