"""Time work of known size first: numbers above the device's physical peak mean a broken timer."""

from dataclasses import dataclass

import torch

from foretoken.domain.errors import ImplausibleTimingError
from foretoken.domain.estimate import DType, OperatorCall
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.operator import find_operator
from foretoken.domain.units import US_PER_S
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.kernel import TensorFactory
from foretoken.profiler.local_device import CPU, LocalDevice
from foretoken.profiler.timer import Stopwatch, time_case

# What the fastest cores do in one cycle, and how fast they tick: two AVX-512 multiply-add units,
# two 64-byte loads; AMX tiles for half precision.
# Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, chapters 2 and 20.
_CPU_CLOCK_HZ = 6e9
_CPU_FLOPS_PER_CYCLE = {DType.FP32: 64, DType.FP16: 2048, DType.BF16: 2048}
_CPU_BYTES_PER_CYCLE = 128

# Boost clocks may exceed those of the data sheet by as much.
_TOLERANCE_RATIO = 1.05

_CPU_COPY_BYTES = 2**24
_CUDA_COPY_BYTES = 2**30
_CPU_GEMM_SIZE = 384
_CUDA_GEMM_SIZE = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class PhysicalLimits:
    """What no kernel on the device can exceed."""

    flops_per_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """Rates reached by a large copy (bytes read plus written) and a large square GEMM."""

    copy_bytes_per_s: float
    gemm_flops_per_s: float


def physical_limits(device: DeviceSpec, dtype: DType, num_threads: int) -> PhysicalLimits:
    """Return the limits of a device.

    The `cpu` device stands for whatever CPU is here, so its data sheet limits nothing; what its
    threads could do at best does.
    """
    if device.name == CPU:
        cycles_per_s = num_threads * _CPU_CLOCK_HZ
        return PhysicalLimits(
            flops_per_s=cycles_per_s * _CPU_FLOPS_PER_CYCLE[dtype],
            bandwidth_bytes_per_s=cycles_per_s * _CPU_BYTES_PER_CYCLE,
        )
    return PhysicalLimits(
        flops_per_s=device.peak_flops(dtype),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
    )


def run_self_test(
    device: LocalDevice, tensors: TensorFactory, stopwatch: Stopwatch, spec: TimerSpec
) -> SelfTest:
    """Time a copy and a GEMM."""
    size = _CUDA_GEMM_SIZE if device.is_cuda else _CPU_GEMM_SIZE
    copy_bytes = _CUDA_COPY_BYTES if device.is_cuda else _CPU_COPY_BYTES
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    copy = time_case(lambda _: target.copy_(source), stopwatch, spec)
    left, right = tensors.random(size, size), tensors.random(size, size)
    gemm = time_case(lambda _: torch.mm(left, right), stopwatch, spec)
    return SelfTest(
        copy_bytes_per_s=2 * copy_bytes / copy.latency_us_median * US_PER_S,
        gemm_flops_per_s=2 * size**3 / gemm.latency_us_median * US_PER_S,
    )


def check_self_test(result: SelfTest, limits: PhysicalLimits) -> None:
    """Refuse a device, or a timer, that claims more than physics allows.

    Raises:
        ImplausibleTimingError: a rate is above the limit; the message names it.

    """
    for what, rate, limit in (
        ("copy, bytes/s", result.copy_bytes_per_s, limits.bandwidth_bytes_per_s),
        ("GEMM, FLOP/s", result.gemm_flops_per_s, limits.flops_per_s),
    ):
        if not 0.0 < rate <= limit * _TOLERANCE_RATIO:
            raise ImplausibleTimingError(
                f"self-test: {what}: {rate:.3g} measured, at most {limit:.3g} possible; check that "
                "the device file describes this device and that nothing disturbs its clock"
            )


def doubts(call: OperatorCall, latency_us: float, limits: PhysicalLimits) -> list[str]:
    """Return the quality flags of a measured latency."""
    spec = find_operator(call.operator)
    if spec.is_collective:
        return []
    flops = spec.flops(call.dims, call.dtype.num_bytes) * spec.work_ratio(call.phase)
    rate = flops / latency_us * US_PER_S
    if rate > limits.flops_per_s * _TOLERANCE_RATIO:
        return [f"above_peak: {rate:.3g} FLOP/s, the device can do {limits.flops_per_s:.3g}"]
    return []
