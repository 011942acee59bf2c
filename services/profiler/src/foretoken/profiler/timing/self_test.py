"""Time work of known size first: numbers above the device's physical peak mean a broken timer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from foretoken.domain.errors import (
    DeviceMemoryError,
    ImplausibleTimingError,
    InvalidRequestError,
)
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.units import US_PER_S
from foretoken.profiler.kernel import TORCH_DTYPES, PreparedCase, TensorFactory
from foretoken.profiler.timing.case import Rig, time_call, time_prepared
from foretoken.profiler.timing.plausibility import TOLERANCE_RATIO, PhysicalLimits, physical_limits

_CPU_COPY_BYTES = 2**24
_CUDA_COPY_BYTES = 2**30
_CPU_GEMM_SIZE = 384
_CUDA_GEMM_SIZE = 8192

# A device that reaches less of its data sheet is shared, throttled or not what its name says.
_SUSPICIOUS_RATIO = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """Rates reached by a large copy (bytes read plus written) and large square GEMMs.

    `limits` are what physics allows, by number format. `untested` are the formats whose GEMM does
    not run here, with the reason. With `is_data_sheet` the limits are what the vendor promises, so
    that far too little is suspicious as well.
    """

    copy_bytes_per_s: float
    gemm_flops_per_s: Mapping[DType, float]
    limits: Mapping[DType, PhysicalLimits]
    is_data_sheet: bool = False
    untested: Mapping[DType, str] = field(default_factory=dict)

    def describe(self) -> dict[str, str]:
        """Return the entries of a run's environment; a warning where a rate is very low."""
        described = {"self_test_copy_bytes_per_s": f"{self.copy_bytes_per_s:.4g}"}
        for position, (dtype, rate) in enumerate(self.gemm_flops_per_s.items()):
            name = dtype.name.lower()
            if position == 0:
                described["self_test_dtype"] = name
                described["self_test_gemm_flops_per_s"] = f"{rate:.4g}"
            else:
                described[f"self_test_gemm_flops_per_s_{name}"] = f"{rate:.4g}"
        for dtype, reason in self.untested.items():
            described[f"self_test_not_run_{dtype.name.lower()}"] = reason
        if self.is_data_sheet:
            ratios = self.ratios()
            described["self_test_data_sheet_ratios"] = " ".join(
                f"{what}={ratio:.2f}" for what, ratio in ratios.items()
            )
            low = [what for what, ratio in ratios.items() if ratio < _SUSPICIOUS_RATIO]
            if low:
                described["self_test_warning"] = (
                    f"{', '.join(low)}: below {_SUSPICIOUS_RATIO:.0%} of the data sheet; look for "
                    "other work on the device, low clocks or a wrong device file"
                )
        return described

    def ratios(self) -> dict[str, float]:
        """Return the share of its limit that each rate reached."""
        limits = list(self.limits.values())
        found = {"copy": self.copy_bytes_per_s / limits[0].bandwidth_bytes_per_s} if limits else {}
        for dtype, rate in self.gemm_flops_per_s.items():
            found[f"gemm_{dtype.name.lower()}"] = rate / self.limits[dtype].flops_per_s
        return found


def run_self_test(rig: Rig, dtypes: Sequence[DType], seed: int) -> SelfTest:
    """Time a copy, and a GEMM in each number format, the same way as every call of a plan.

    Raises:
        ImplausibleTimingError: a rate is above what physics allows; the message names it.
        RuntimeError: the device does not answer.

    """
    rates: dict[DType, float] = {}
    untested: dict[DType, str] = {}
    for dtype in dtypes:
        try:
            rates[dtype] = _gemm_flops_per_s(rig, dtype, seed)
        except (InvalidRequestError, DeviceMemoryError) as err:
            untested[dtype] = err.message
        except RuntimeError as err:
            # A device that does not answer any more fails the copy, too.
            untested[dtype] = f"{type(err).__name__}: {err}".partition("\n")[0]
    result = SelfTest(
        copy_bytes_per_s=_copy_bytes_per_s(rig, seed),
        gemm_flops_per_s=rates,
        limits={
            dtype: physical_limits(rig.device_spec, dtype, rig.num_threads) for dtype in dtypes
        },
        is_data_sheet=rig.device.is_cuda,
        untested=untested,
    )
    check_self_test(result)
    return result


def check_self_test(result: SelfTest) -> None:
    """Refuse a device, or a timer, that claims more than physics allows.

    Raises:
        ImplausibleTimingError: a rate is above the limit; the message names it.

    """
    for what, ratio in result.ratios().items():
        if not 0.0 < ratio <= TOLERANCE_RATIO:
            raise ImplausibleTimingError(
                f"self-test: the {what} reached {ratio:.2f} times what is physically possible, so "
                "no number would be right: check that the device file describes this device "
                "(its peaks, `vendor_names`), and that nothing changes the clock of the host"
            )


def _gemm_flops_per_s(rig: Rig, dtype: DType, seed: int) -> float:
    size = _CUDA_GEMM_SIZE if rig.device.is_cuda else _CPU_GEMM_SIZE
    if dtype not in TORCH_DTYPES:
        raise InvalidRequestError.of_field("dtype", f"torch has no tensors of {dtype.name}")
    call = OperatorCall(
        operator="gemm",
        dtype=dtype,
        phase=Phase.FORWARD,
        dims={"m": size, "n": size, "k": size},
    )
    tensors = TensorFactory(rig.device.torch_device, TORCH_DTYPES[dtype], seed)
    latency_us = time_call(call, tensors, rig).summary.latency_us_median
    return 2 * size**3 / latency_us * US_PER_S


def _copy_bytes_per_s(rig: Rig, seed: int) -> float:
    num_bytes = _CUDA_COPY_BYTES if rig.device.is_cuda else _CPU_COPY_BYTES
    with torch.cuda.stream(rig.stream):
        case = copy_case(rig, num_bytes, seed)
        summary, _, _ = time_prepared(case, ("self-test", "copy"), rig)
    return 2 * num_bytes / summary.latency_us_median * US_PER_S


def copy_case(rig: Rig, num_bytes: int, seed: int) -> PreparedCase:
    """Return a copy of that many bytes into memory that is there already."""
    tensors = TensorFactory(rig.device.torch_device, torch.float32, seed)
    source = tensors.random(num_bytes // 4)
    target = torch.empty_like(source)
    return PreparedCase(
        call=lambda _: target.copy_(source),
        input_bytes=num_bytes,
        num_input_sets=1,
        source="torch.Tensor.copy_",
    )
