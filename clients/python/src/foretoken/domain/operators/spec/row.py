"""What operators share that treat tokens alike or stream flat tensors once.

Each reads and writes some values per feature; its time is memory traffic and, for few rows, launch
latency.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from foretoken.domain.operators.spec.operator import Dim, Dims, OperatorSpec
from foretoken.domain.operators.spec.sweep import cross, pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide

# Rows of the sum that stands in: wide enough that its width does not matter.
_WIDTH = 8192
# A sum of two tensors of 16 bit reads two elements and writes one.
_ADDITION_BYTES = 3 * 2


def flat_operator(
    name: str, summary: str, moved_bytes: Callable[[float], float], num_flops: int = 1
) -> OperatorSpec:
    """Return an operator over `num_params` values.

    `moved_bytes` of one value follow from the bytes of an element of the call's number format. In
    16 bit it takes as long as a sum of two tensors that moves as many bytes.
    """

    def sweep(quick: bool) -> Iterator[Mapping[str, int]]:
        sizes = pick(quick, powers_of_two(2**14, 2**24)[::2], powers_of_two(2**16, 2**31))
        yield from cross(num_params=sizes)

    return OperatorSpec(
        name=name,
        summary=summary,
        group="optimizer",
        dims=(Dim("num_params", "values, one per parameter"),),
        flops=lambda d, _: num_flops * d["num_params"],
        moved_bytes=lambda d, element_bytes: moved_bytes(element_bytes) * d["num_params"],
        sweep=sweep,
        proxy_operator=lambda d: addition_of(d["num_params"] * round(moved_bytes(2.0))),
    )


def addition_of(num_bytes: Quantity) -> tuple[str, Dims]:
    """Return the sum of two 16-bit tensors that moves as many bytes."""
    rows = ceil_divide(num_bytes, _ADDITION_BYTES * _WIDTH)
    return "residual_add", {"num_tokens": rows, "hidden": _WIDTH}


# What stands in for a row operator nobody measured: the sum of two tensors reads two elements and
# writes one.
_ADDITION = "residual_add"
_ADDITION_MOVED = 3
# How long a kernel of PyTorch that broadcasts or reorders takes over a sum of two tensors as large.
# Source: the chain of them in the RMS norm of GPUModeling25's samples, without its read: 1.1 (A100)
# and 1.5 (GH200) sums each.
_STRIDED_PERCENT = 125

_FULL_TOKENS = powers_of_two(1, 32768)
# Powers of two, and the widths of common models between them.
_FULL_WIDTHS = (*powers_of_two(256, 32768), 3584, 11008, 14336)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWork:
    """Work per output feature of one token.

    `num_moved` counts the elements read and written, `num_weights` the parameters per feature
    (read once per call), `num_saved` the elements kept for the backward pass. With `is_strided`
    a kernel of PyTorch computes every element's place: then it takes longer than what it moves.
    `chain_ratios` and `chain_kernels` are those of `OperatorSpec`.
    """

    num_flops: int
    num_moved: int
    num_saved: int
    num_weights: int = 0
    backward_work_ratio: float
    is_strided: bool = False
    chain_ratios: tuple[float, float] = (1.0, 1.0)
    chain_kernels: tuple[int, int] = (1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickSweep:
    """The few points a quick profile measures."""

    num_tokens: tuple[int, ...]
    widths: tuple[int, ...]


def row_operator(
    name: str, summary: str, *, width: Dim, work: RowWork, quick_sweep: QuickSweep
) -> OperatorSpec:
    """Return an operator over `num_tokens` rows of `width` features."""

    def features_of(d: Dims) -> Quantity:
        return d["num_tokens"] * d[width.name]

    def moved_bytes(d: Dims, element_bytes: float) -> Quantity:
        elements = work.num_moved * features_of(d) + work.num_weights * d[width.name]
        return elements * element_bytes

    def sweep(quick: bool) -> Iterator[Mapping[str, int]]:
        yield from cross(
            num_tokens=pick(quick, quick_sweep.num_tokens, _FULL_TOKENS),
            **{width.name: pick(quick, quick_sweep.widths, _FULL_WIDTHS)},
        )

    def addition(d: Dims) -> tuple[str, Dims]:
        rows = d["num_tokens"]
        if work.is_strided:
            rows = ceil_divide(rows * _STRIDED_PERCENT, 100)
        else:
            rows = ceil_divide(rows * work.num_moved, _ADDITION_MOVED)
        return _ADDITION, {"num_tokens": rows, "hidden": d[width.name]}

    return OperatorSpec(
        name=name,
        summary=summary,
        dims=(Dim("num_tokens", "rows"), width),
        flops=lambda d, _: work.num_flops * features_of(d),
        moved_bytes=moved_bytes,
        features={
            "rows_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms,
            "width_alignment": lambda d, _: d[width.name] % 1024,
        },
        costs={
            "rows": lambda d, _: d["num_tokens"],
            "width": lambda d, _: d[width.name],
            "row_waves": lambda d, num_sms: ceil_divide(d["num_tokens"], num_sms),
            "wave_features": lambda d, num_sms: (
                ceil_divide(d["num_tokens"], num_sms) * d[width.name]
            ),
        },
        sweep=sweep,
        backward_work_ratio=work.backward_work_ratio,
        num_weights=lambda d: work.num_weights * d[width.name],
        saved_elements=lambda d: work.num_saved * features_of(d),
        proxy_operator=addition if name != _ADDITION else None,
        chain_ratios=work.chain_ratios,
        chain_kernels=work.chain_kernels,
    )
