"""What physics allows a device to do, and which measured latencies claim more."""

from dataclasses import dataclass

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import least_element_bytes
from foretoken.domain.units import US_PER_S
from foretoken.profiler.local_device import CPU

# What the fastest cores do in one cycle, and how fast they tick: two AVX-512 multiply-add units,
# two 64-byte loads; AMX tiles for half precision and integers.
# Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, chapters 2 and 20.
_CPU_CLOCK_HZ = 6e9
_CPU_FLOPS_PER_CYCLE = {
    DType.FP32: 64,
    DType.TF32: 1024,
    DType.FP16: 2048,
    DType.BF16: 2048,
    DType.FP8: 4096,
    DType.INT8: 4096,
}
_CPU_BYTES_PER_CYCLE = 128

# Boost clocks may exceed those of the data sheet by as much.
TOLERANCE_RATIO = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class PhysicalLimits:
    """What no kernel on the device can exceed."""

    flops_per_s: float
    bandwidth_bytes_per_s: float


def physical_limits(device: DeviceSpec, dtype: DType, num_threads: int) -> PhysicalLimits:
    """Return the limits of a device.

    The `cpu` device stands for whatever CPU is here, so its data sheet limits nothing; what its
    threads could do at best does.
    """
    if device.name == CPU:
        cycles_per_s = num_threads * _CPU_CLOCK_HZ
        widest = max(_CPU_FLOPS_PER_CYCLE.values())
        return PhysicalLimits(
            flops_per_s=cycles_per_s * _CPU_FLOPS_PER_CYCLE.get(dtype, widest),
            bandwidth_bytes_per_s=cycles_per_s * _CPU_BYTES_PER_CYCLE,
        )
    return PhysicalLimits(
        flops_per_s=device.peak_flops(dtype),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
    )


def implausible_flags(
    call: OperatorCall, latency_us: float, limits: PhysicalLimits, cache_bytes: float = 0.0
) -> list[str]:
    """Return the quality flags of a measured latency.

    `cache_bytes` is what the device may have kept from the call before; infinite where all of it
    stays. A backward pass counts with the bytes of the forward pass: it moves no fewer.
    """
    spec = find_operator(call.operator)
    if spec.is_collective:
        return []
    found = []
    element_bytes = least_element_bytes(call.dtype, call.variant)
    flops = spec.flops(call.dims, element_bytes) * spec.work_ratio(call.phase)
    rate = flops / latency_us * US_PER_S
    if rate > limits.flops_per_s * TOLERANCE_RATIO:
        found.append(f"above_peak: {rate:.3g} FLOP/s, the device can do {limits.flops_per_s:.3g}")
    moved = spec.moved_bytes(call.dims, element_bytes)
    bandwidth = (moved - cache_bytes) / latency_us * US_PER_S
    if moved > 2.0 * cache_bytes and bandwidth > limits.bandwidth_bytes_per_s * TOLERANCE_RATIO:
        found.append(
            f"above_bandwidth: {bandwidth:.3g} bytes/s, the device can move "
            f"{limits.bandwidth_bytes_per_s:.3g}"
        )
    return found
