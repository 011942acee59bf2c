"""One matrix product per expert, its rows the tokens routed there: forward, or input gradient."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims, FeatureFormula, OperatorSpec
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide

# (out, in) of an expert's two products. Source: the models' config.json.
_WIDTHS = ((4096, 2048), (2048, 4096), (1536, 4096), (1536, 2048), (2048, 768))
# Tokens of a large micro batch, eight times each.
_MAX_ROWS = 2**18

GROUPED_DIMS = (
    Dim("num_groups", "experts on this device, each with a weight of its own"),
    Dim("m", "rows of all groups together: pairs of a token and an expert"),
    Dim("n", "output features of an expert"),
    Dim("k", "input features of an expert"),
)


def grouped_flops(d: Dims, _element_bytes: float) -> Quantity:
    """Return the operations of all groups; a group's rows add up to `m`."""
    return 2 * d["m"] * d["n"] * d["k"]


def grouped_bytes(d: Dims, element_bytes: float) -> Quantity:
    """Return the bytes of inputs, outputs and every group's weight."""
    elements = d["m"] * (d["k"] + d["n"]) + d["num_groups"] * d["n"] * d["k"]
    return elements * element_bytes


def _tiles(d: Dims) -> Quantity:
    rows = ceil_divide(d["m"], d["num_groups"])
    return d["num_groups"] * ceil_divide(rows, 128) * ceil_divide(d["n"], 128)


GROUPED_FEATURES: Mapping[str, FeatureFormula] = {
    "rows_per_group": lambda d, _: d["m"] / d["num_groups"],
    "waves_128x128": lambda d, num_sms: _tiles(d) / num_sms,
    "n_alignment": lambda d, _: d["n"] % 64,
    "k_alignment": lambda d, _: d["k"] % 64,
}


def sweep_groups(quick: bool) -> Iterator[Mapping[str, int]]:
    """Yield the experts of small and large layers, by the rows of a group.

    Wide experts are those of Mixtral and of large ones split over ranks, narrow ones Qwen3's.
    """
    widths = ((256, 512), (512, 256)) if quick else _WIDTHS
    for num_groups in pick(quick, (2, 8), (2, 8, 32, 128)):
        for rows in pick(quick, (16, 128), powers_of_two(16, 8192)):
            for n, k in widths if num_groups * rows <= _MAX_ROWS else ():
                yield {"num_groups": num_groups, "m": num_groups * rows, "n": n, "k": k}


SPEC = OperatorSpec(
    name="grouped_gemm",
    summary="C[i] = A[i] B[i] for every group i of rows, accumulated in fp32",
    group="moe",
    dims=GROUPED_DIMS,
    flops=grouped_flops,
    moved_bytes=grouped_bytes,
    features=GROUPED_FEATURES,
    sweep=sweep_groups,
    # Both gradients together, for sources that time a whole backward pass.
    backward_work_ratio=2.0,
    num_weights=lambda d: d["num_groups"] * d["n"] * d["k"],
    saved_elements=lambda d: d["m"] * d["k"],
    proxy_operator=lambda d: ("gemm", {"m": d["m"], "n": d["n"], "k": d["k"]}),
)
