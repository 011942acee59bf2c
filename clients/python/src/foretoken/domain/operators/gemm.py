"""Dense matrix multiplication, the weight GEMM of every linear layer."""

from collections.abc import Iterator, Mapping

from foretoken.domain.operators.spec.operator import Dim, Dims, FeatureFormula, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, powers_of_two
from foretoken.domain.operators.spec.tile import tile_costs
from foretoken.domain.units import Quantity, ceil_divide

# Output tile shapes that cuBLAS and CUTLASS choose among (rows of m, columns of n).
# Source: CUTLASS profiler defaults for sm80 and sm90.
_TILES = ((64, 64), (128, 64), (128, 128), (128, 256), (256, 128))
# Widths of Llama 3 and Qwen 3 that are no power of two: hidden states, and what ranks hold of
# projections split over 2 to 8 of them. Source: their config.json.
_HIDDEN_WIDTHS = (2048, 4096, 5120, 8192)
_SHARD_WIDTHS = (768, 1280, 1792, 7168, 28672)
# Heads, whole and split over 8 ranks: Llama 2, Llama 3, Qwen 3.
_VOCABULARIES = (32000, 128256, 151936, 16032, 18992)


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
    if quick:
        yield from _quick_sweep()
        return
    widths = (*powers_of_two(256, 32768), 1536, 3584, 11008, 14336)
    tokens = (1, 2, 4, *powers_of_two(8, 16384), 96, 192, 384, 1536)
    yield from cross(m=tokens, n=widths, k=widths)
    few_tokens = (1, 16, 128, 1024, 8192)
    yield from cross(m=few_tokens, n=_SHARD_WIDTHS, k=_HIDDEN_WIDTHS)
    yield from cross(m=few_tokens, n=_HIDDEN_WIDTHS, k=_SHARD_WIDTHS)
    yield from cross(m=few_tokens, n=_VOCABULARIES, k=_HIDDEN_WIDTHS)


def _quick_sweep() -> Iterator[Mapping[str, int]]:
    """Yield the weights of a small model, by tokens."""
    weights = ((256, 256), (512, 512), (1024, 512), (2816, 512), (8000, 512), (512, 1408))
    for n, k in weights:
        yield from cross(m=(1, 4, 16, 64, 256, 1024), n=(n,), k=(k,))


SPEC = OperatorSpec(
    name="gemm",
    summary="C[m,n] = A[m,k] B[k,n], accumulated in fp32",
    group="gemm",
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
    costs=tile_costs(lambda d: (1, d["m"], d["n"], d["k"])),
    sweep=_sweep,
    # The gradients of input and weight together, as sources that time a backward pass have them.
    backward_work_ratio=2.0,
    backward_calls=lambda d: (
        {"m": d["m"], "n": d["k"], "k": d["n"]},
        {"m": d["n"], "n": d["k"], "k": d["m"]},
    ),
    num_weights=lambda d: d["n"] * d["k"],
    saved_elements=lambda d: d["m"] * d["k"],
)
