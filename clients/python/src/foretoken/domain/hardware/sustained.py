"""What power limits: calls that run for long take longer than in the bursts that time most of them.

Arithmetic at the full clock may take more power than a device is allowed. After some tenths of a
second its clock falls until it does not, and as power goes with the third power of clock and
voltage together, a call that would take twice the power allowed runs at 0.79 of its speed. What is
allowed beyond what the device takes without working buys so much of its peak in every format,
`throttled_from_ratio` of a device's file, and traffic to the memory counts as well.
"""

from foretoken.domain.hardware.device import DeviceSpec, all_devices
from foretoken.domain.hardware.roofline import RooflineTerms
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import Quantity

# Power goes with this power of the clock: frequency times the square of a voltage that follows it.
# Source: of 13,566 to 35,742 GEMMs of H200, B200 and GB200, each timed for a second and in bursts,
# with the exponent fitted as well: 0.31 to 0.33 in four of eight tables, else 0.38 to 0.67.
_CLOCK_POWER = 3.0
# The power of memory traffic at full bandwidth, as a share of the peak that takes as much. Source:
# the same tables, 0.26 to 0.32 in most.
_TRAFFIC_RATIO = 0.27
# The part of a device's power that it takes without working. Source: power of small GEMMs there,
# 137 to 174 W of an H200's 700, 285 to 330 of a B200's 1,000, 259 to 320 of a GB200's 1,200.
_STATIC_RATIO = 0.25
# Formats whose arithmetic takes as much power.
_ALIKE = {DType.FP16: DType.BF16, DType.INT8: DType.FP8, DType.INT4: DType.FP4}
# Within which factor nine tenths of slowdowns are that power causes: 2.06 times the mean error of
# the law. Source: bench_sustained.py, products of H200 and B200 that are slowed, 3.8 to 6.3 % off
# on average (13 to 21 without the law).
SLOWED_SPREAD_LOG = 0.1
# Software whose tables have a mean power and hold bursts all the same. Source: bench_sustained.py:
# of products at half to 0.7 of a B200's peak in BF16 SGLang's take 1.04 times what vLLM's bursts
# do, vLLM 0.22.0's 1.14 and TensorRT-LLM 1.3.0rc15's 1.17 times, and 1.3.0rc20's 1.02.
BURSTS_WITH_POWER = frozenset({"trtllm 1.3.0rc20"})
# Operators that the tensor cores work for; others are far from the limit.
MATRIX_GROUPS = frozenset({"gemm", "attention", "moe"})


def slowed_ratio(
    device: DeviceSpec,
    dtype: DType,
    terms: RooflineTerms,
    burst_us: Quantity,
    power_limit_w: float = 0.0,
) -> Quantity:
    """Return how many times longer a call takes for long than the `burst_us` that it takes once.

    1 where power does not limit it, or where nothing is known of the device's power.
    `power_limit_w` is what the device is set to (0: what it is sold with).
    """
    free = _throttled_from(device, dtype, power_limit_w)
    if not free:
        return 1.0 + 0.0 * burst_us
    demand = _demand(terms, burst_us) / free
    return _larger(demand, 1.0) ** (1.0 / _CLOCK_POWER)


def is_limited(device: DeviceSpec, dtype: DType, power_limit_w: float) -> bool:
    """Return whether anything is known that power slows a device's arithmetic in a format."""
    return bool(_throttled_from(device, dtype, power_limit_w) or device.sustained_flops_ratio)


def burst_ratio(
    device: DeviceSpec, dtype: DType, terms: RooflineTerms, sustained_us: Quantity
) -> Quantity:
    """Return how many times longer than once a call took that was timed for long.

    The inverse of `slowed_ratio`, at the power that the device is sold with.
    """
    free = _throttled_from(device, dtype, 0.0)
    if not free:
        return 1.0 + 0.0 * sustained_us
    demand = _demand(terms, sustained_us) / free
    return _larger(demand, 1.0) ** (1.0 / (_CLOCK_POWER - 1.0))


def _demand(terms: RooflineTerms, latency_us: Quantity) -> Quantity:
    """Return the power that a call takes at the full clock, as the share of the peak that takes it.

    A call that takes less than its traffic at full bandwidth has it from a cache.
    """
    traffic = 1.0 - _larger(1.0 - terms.memory_us / latency_us, 0.0)
    return terms.compute_us / latency_us + _TRAFFIC_RATIO * traffic


def _throttled_from(device: DeviceSpec, dtype: DType, power_limit_w: float) -> float:
    """Return from which share of the peak on power limits a device; 0 where it is not known."""
    own = _known_ratio(device, dtype)
    if not power_limit_w or power_limit_w >= device.tdp_w:
        return own
    # Where nothing is known it is taken to reach its peak with the power that it is sold with.
    static_w = _STATIC_RATIO * device.tdp_w
    left = max(power_limit_w - static_w, 0.05 * device.tdp_w) / (device.tdp_w - static_w)
    return (own or 1.0) * left


def _known_ratio(device: DeviceSpec, dtype: DType) -> float:
    """Return a device's own share, or that of the nearest of its architecture, moved by power."""
    own = _read_ratio(device, dtype)
    if own:
        return own
    siblings = [
        other
        for other in all_devices().values()
        if other.architecture == device.architecture and _read_ratio(other, dtype)
    ]
    if not siblings or dtype not in device.peak_flops_per_s:
        return 0.0
    nearest = min(siblings, key=lambda other: (abs(other.tdp_w - device.tdp_w), other.name))
    # The same energy for the same arithmetic, of as much more power.
    more_power = device.tdp_w / nearest.tdp_w
    more_peak = device.peak_flops(dtype) / nearest.peak_flops(dtype)
    return _read_ratio(nearest, dtype) * more_power / more_peak


def _read_ratio(device: DeviceSpec, dtype: DType) -> float:
    ratios = device.throttled_from_ratio
    return ratios.get(dtype) or ratios.get(_ALIKE.get(dtype, dtype), 0.0)


def _larger(first: Quantity, second: Quantity) -> Quantity:
    """Return the larger of two quantities, elementwise for columns."""
    return (first + second + abs(first - second)) / 2
