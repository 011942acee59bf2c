"""Dense matrix multiplication, the weight GEMM of every linear layer."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operator import Dim, Dims, FeatureFormula, OperatorSpec
from foretoken.domain.sweep import cross, pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide

# Output tile shapes that cuBLAS and CUTLASS choose among (rows of m, columns of n).
# Source: CUTLASS profiler defaults for sm80 and sm90.
_TILES = ((64, 64), (128, 64), (128, 128), (128, 256), (256, 128))


def _flops(d: Dims, _element_bytes: float) -> Quantity:
    return 2 * d["m"] * d["n"] * d["k"]


def _moved_bytes(d: Dims, element_bytes: float) -> Quantity:
    return (d["m"] * d["k"] + d["k"] * d["n"] + d["m"] * d["n"]) * element_bytes


def _waves(tile_m: int, tile_n: int) -> FeatureFormula:
    def waves(d: Dims, num_sms: int) -> Quantity:
        return ceil_divide(d["m"], tile_m) * ceil_divide(d["n"], tile_n) / num_sms

    return waves


def _fill(tile_m: int, tile_n: int) -> FeatureFormula:
    def fill(d: Dims, num_sms: int) -> Quantity:
        tiles = ceil_divide(d["m"], tile_m) * ceil_divide(d["n"], tile_n)
        return tiles / (ceil_divide(tiles, num_sms) * num_sms)

    return fill


def _sweep(quick: bool) -> Iterator[Mapping[str, int]]:
    yield from cross(
        m=pick(quick, (1, 16, 64, 256), (1, 2, 4, *powers_of_two(8, 16384), 96, 192, 384, 1536)),
        n=pick(quick, (512, 1024, 2048), (*powers_of_two(256, 32768), 1536, 3584, 11008, 14336)),
        k=pick(quick, (512, 1024), (*powers_of_two(256, 32768), 1536, 3584, 11008, 14336)),
    )


SPEC = OperatorSpec(
    name="gemm",
    summary="C[m,n] = A[m,k] B[k,n], accumulated in fp32",
    dims=(
        Dim("m", "rows of the activation: tokens"),
        Dim("n", "output features"),
        Dim("k", "input features, the reduced dimension"),
    ),
    flops=_flops,
    moved_bytes=_moved_bytes,
    features={
        **{f"waves_{tm}x{tn}": _waves(tm, tn) for tm, tn in _TILES},
        **{f"fill_{tm}x{tn}": _fill(tm, tn) for tm, tn in _TILES},
        "tile_m_fill": lambda d, _: d["m"] / (ceil_divide(d["m"], 64) * 64),
        "tile_n_fill": lambda d, _: d["n"] / (ceil_divide(d["n"], 128) * 128),
        "k_alignment": lambda d, _: d["k"] % 64,
        "m_alignment": lambda d, _: d["m"] % 16,
    },
    sweep=_sweep,
    # dgrad and wgrad are GEMMs of their own; lowering emits them as forward calls.
    backward_work_ratio=0.0,
    num_weights=lambda d: d["n"] * d["k"],
    saved_elements=lambda d: d["m"] * d["k"],
)
