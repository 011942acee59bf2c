"""A GEMM as models run it: activations times a weight stored [out, in] (TN).

Variants are other layouts (`layout=nn` is the product of an input gradient, `layout=nt` of a weight
gradient), other scales and accumulations of FP8, and weights in other formats (`quant=...`). Plain
FP8 has one scale per tensor and accumulates in fp32, plain INT8 in int32.

Products of 16 bit run with torch's defaults, as models do: cuBLAS accumulates in fp32, and may add
up the partial sums of split-K in 16 bit; `accumulate=fp32` is the case where it may not.

FP8, INT8 and TF32 have no backward pass of their own here: training multiplies FP8 in the TN layout
both ways, so the forward calls of the gradients' shapes say what it takes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory, has_capability, is_cuda, runs
from foretoken.profiler.scaling import FP8, make_scales

_Bind = Callable[[Mapping[str, int]], Callable[..., Any]]

_FP8_MULTIPLE = 16
# Fewer rows torch refuses to multiply in INT8 on GPUs.
_INT8_MULTIPLE, _INT8_ROWS_MIN = 8, 17
_HALF_DTYPES = frozenset({DType.FP16, DType.BF16})


def _make_linear(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["m"], dims["k"]), tensors.random(dims["n"], dims["k"])


def _make_nn(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["m"], dims["k"]), tensors.random(dims["k"], dims["n"])


def _make_nt(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    return tensors.random(dims["k"], dims["m"]), tensors.random(dims["k"], dims["n"])


def _multiply_nt(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.t().mm(right)


def _make_fp8(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    _check_multiple(dims, ("n", "k"), _FP8_MULTIPLE, tensors)
    scales = (make_scales(tensors), make_scales(tensors))
    return (*_make_linear(dims, tensors), *scales)


def _make_fp8_rows(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    _check_multiple(dims, ("n", "k"), _FP8_MULTIPLE, tensors)
    scales = (make_scales(tensors, dims["m"], 1), make_scales(tensors, 1, dims["n"]))
    return (*_make_linear(dims, tensors), *scales)


def _check_multiple(
    dims: Mapping[str, int], names: tuple[str, ...], multiple: int, tensors: TensorFactory
) -> None:
    if not is_cuda(tensors.device):
        return
    for name in names:
        if dims[name] % multiple:
            raise InvalidRequestError.of_field(
                name, f"must be a multiple of {multiple} for torch's kernel, not {dims[name]}"
            )


def _bind_fp8(*, is_fast: bool) -> _Bind:
    def run(
        x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor
    ) -> torch.Tensor:
        return torch._scaled_mm(  # noqa: SLF001
            x,
            weight.t(),
            scale_a=x_scale,
            scale_b=weight_scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=is_fast,
        )

    return lambda _: run


def _try_fp8(*, has_rows: bool) -> Callable[[torch.device], object]:
    def attempt(device: torch.device) -> object:
        dims, make = {"m": 32, "n": 32, "k": 32}, _make_fp8_rows if has_rows else _make_fp8
        inputs = make(dims, TensorFactory(device, FP8, seed=0))
        return _bind_fp8(is_fast=False)(dims)(*inputs)

    return attempt


def _make_int8(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    _check_multiple(dims, ("n", "k"), _INT8_MULTIPLE, tensors)
    if is_cuda(tensors.device) and dims["m"] < _INT8_ROWS_MIN:
        raise InvalidRequestError.of_field(
            "m", f"must be at least {_INT8_ROWS_MIN} for torch._int_mm, not {dims['m']}"
        )
    return _make_linear(dims, tensors)


def _multiply_int8(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(x, weight.t())  # noqa: SLF001


def _try_int8(device: torch.device) -> object:
    return _multiply_int8(
        *_make_int8({"m": 32, "n": 32, "k": 32}, TensorFactory(device, torch.int8, seed=0))
    )


def _make_int8_weights(dims: Mapping[str, int], tensors: TensorFactory) -> Inputs:
    weight = tensors.random(dims["n"], dims["k"]).mul_(32).to(torch.int8)
    return tensors.random(dims["m"], dims["k"]), weight, tensors.random(dims["n"]).abs_()


def _multiply_int8_weights(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    return torch._weight_int8pack_mm(x, weight, scales)  # noqa: SLF001


def _try_int8_weights(device: torch.device) -> object:
    tensors = TensorFactory(device, torch.bfloat16, seed=0)
    return _multiply_int8_weights(*_make_int8_weights({"m": 32, "n": 32, "k": 32}, tensors))


def _with_setting(setting: str, *, value: bool) -> _Bind:
    """Return the product under one of torch's global settings of cuBLAS, restored after it."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        matmul = torch.backends.cuda.matmul
        before = getattr(matmul, setting)
        setattr(matmul, setting, value)
        try:
            return functional.linear(x, weight)
        finally:
            setattr(matmul, setting, before)

    return lambda _: run


def _without_reduction(dtype: str) -> _Bind:
    return _with_setting(f"allow_{dtype}_reduced_precision_reduction", value=False)


def _scaled(variant: str = "", *, is_fast: bool = False, has_rows: bool = False) -> Kernel:
    return Kernel(
        operator="gemm",
        source="torch._scaled_mm",
        variant=variant,
        dtypes=frozenset({DType.FP8}),
        make_inputs=_make_fp8_rows if has_rows else _make_fp8,
        bind=_bind_fp8(is_fast=is_fast),
        is_present=runs(_try_fp8(has_rows=has_rows)),
    )


_SOURCE = "torch.nn.functional.linear"

KERNEL = Kernel(
    operator="gemm",
    source=_SOURCE,
    make_inputs=_make_linear,
    bind=lambda _: functional.linear,
    differentiable=(0, 1),
    alternatives=(
        Kernel(
            operator="gemm",
            source="torch.mm",
            variant="layout=nn",
            make_inputs=_make_nn,
            bind=lambda _: torch.mm,
        ),
        Kernel(
            operator="gemm",
            source="torch.mm",
            variant="layout=nt",
            make_inputs=_make_nt,
            bind=lambda _: _multiply_nt,
        ),
        *(
            Kernel(
                operator="gemm",
                source=_SOURCE,
                variant="accumulate=fp32",
                dtypes=frozenset({dtype}),
                make_inputs=_make_linear,
                bind=_without_reduction(dtype.name.lower()),
                is_present=is_cuda,
            )
            for dtype in sorted(_HALF_DTYPES, key=lambda dtype: dtype.name)
        ),
        Kernel(
            operator="gemm",
            source=_SOURCE,
            dtypes=frozenset({DType.TF32}),
            make_inputs=_make_linear,
            bind=_with_setting("allow_tf32", value=True),
            is_present=has_capability(8),
        ),
        _scaled(),
        # Scales that are known before the product: what plain FP8 is, too.
        _scaled("quant=fp8_static"),
        _scaled("scale=row", has_rows=True),
        _scaled("accumulate=fast", is_fast=True),
        Kernel(
            operator="gemm",
            source="torch._int_mm",
            dtypes=frozenset({DType.INT8}),
            make_inputs=_make_int8,
            bind=lambda _: _multiply_int8,
            is_present=runs(_try_int8),
        ),
        Kernel(
            operator="gemm",
            source="torch._weight_int8pack_mm",
            variant="quant=int8_wo",
            dtypes=frozenset({DType.BF16}),
            make_inputs=_make_int8_weights,
            bind=lambda _: _multiply_int8_weights,
            is_present=runs(_try_int8_weights),
        ),
    ),
)
