"""Exact accelerator products and their physical limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError
from foretoken.domain.hardware.sourced import load_sourced
from foretoken.domain.measurements.estimate import DType


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One device product.

    `platform` is the stack that programs it: `cuda`, `rocm`, `xpu`, `hpu` or `cpu`, as engines'
    installation pages call them (empty: not known, and no engine is refused for it).
    `num_sms` counts what a device has of streaming multiprocessors, AMD's compute units, Intel's Xe
    or tensor processor cores, `l2_cache_bytes` the last cache before the memory.
    `peak_flops_per_s` is dense (no sparsity), per dtype, from the vendor's data sheet.
    `launch_latency_us` is the shortest time a kernel takes on the device, the floor of any latency.
    `throttled_from_ratio` is, per dtype, the share of the peak from which on power slows what runs
    for long (see `hardware/sustained.py`; empty: not known). `sustained_flops_ratio` is the share
    that nothing exceeds for long, where a document says so (0: none does). Processors of its hosts
    take `host_time_ratio` times as long as the x86 ones that most engines' hosts were measured on.
    `vendor_names` are the names drivers and other tools print for it.
    """

    name: str
    description: str
    kind: str
    architecture: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[DType, float]
    num_sms: int
    l2_cache_bytes: float
    clock_hz: float
    tdp_w: float
    launch_latency_us: float
    sustained_flops_ratio: float = 0.0
    throttled_from_ratio: Mapping[DType, float] = field(default_factory=dict)
    host_time_ratio: float = 1.0
    vendor_names: tuple[str, ...] = ()
    platform: str = ""

    def peak_flops(self, dtype: DType) -> float:
        """Return FLOP/s of a dtype; one the device lacks runs at the next wider one it has.

        Raises:
            InvalidRequestError: the device computes in no format as wide as this one.

        """
        for candidate in _WIDER[dtype]:
            if candidate in self.peak_flops_per_s:
                return self.peak_flops_per_s[candidate]
        raise InvalidRequestError.of_field("dtype", f"{self.name} cannot compute in {dtype.name}")

    def knows_peak(self, dtype: DType) -> bool:
        """Return whether nothing computes in a format faster than `peak_flops` says.

        Where the device has the format and its file no peak of it, a wider one's is no limit.
        """
        return dtype in self.peak_flops_per_s or bool(self.find_missing_format(dtype))

    def find_missing_format(self, dtype: DType) -> str:
        """Return why matrices cannot be multiplied in a format, empty where they can.

        Of formats but FP8 and FP4 nothing is said: all devices have them, or a wider one instead.
        """
        since = _FIRST_WITH.get(dtype, (self.architecture,))
        if dtype in self.peak_flops_per_s or self.architecture in since:
            return ""
        name = dtype.name.lower()
        return f"{self.name} ({self.architecture}) has no {name}: {', '.join(since)} devices have"


# Architectures whose tensor cores multiply in a format that others lack. Source: NVIDIA CUDA C++
# Programming Guide, tensor cores by compute capability (8.9 and 9.0 have FP8, 10.0 has FP4); AMD
# CDNA 3 and CDNA 4 and Intel Gaudi 3 white papers.
_FIRST_WITH: Mapping[DType, tuple[str, ...]] = {
    DType.FP8: ("ada", "hopper", "blackwell", "cdna3", "cdna4", "gaudi3"),
    DType.FP4: ("blackwell", "cdna4"),
}
# The formats a device may compute in instead, nearest first.
_WIDER: Mapping[DType, tuple[DType, ...]] = {
    DType.FP4: (DType.FP4, DType.FP8, DType.BF16, DType.FP16, DType.FP32),
    DType.INT4: (DType.INT4, DType.BF16, DType.FP16, DType.FP32),
    DType.INT8: (DType.INT8, DType.BF16, DType.FP16, DType.FP32),
    DType.FP8: (DType.FP8, DType.BF16, DType.FP16, DType.FP32),
    DType.FP16: (DType.FP16, DType.BF16, DType.FP32),
    DType.BF16: (DType.BF16, DType.FP16, DType.FP32),
    DType.TF32: (DType.TF32, DType.FP32),
    DType.FP32: (DType.FP32,),
}


@cache
def all_devices() -> dict[str, DeviceSpec]:
    """Return every device by name: one file each in `devices/`."""
    return load_sourced(DeviceSpec, "devices")


def find_device(name: str) -> DeviceSpec:
    """Return the device of that name, or of that vendor name, whatever its case.

    Raises:
        UnknownDeviceError: there is none; the message names the nearest.

    """
    devices = all_devices()
    own_name = canonical_device(name)
    if own_name not in devices:
        raise UnknownDeviceError.named(name, devices)
    return devices[own_name]


def check_format(field: str, dtype: DType, device: DeviceSpec) -> None:
    """Refuse to multiply in a format that a device lacks.

    Raises:
        InvalidRequestError: it does; the message says which devices have it.

    """
    if reason := device.find_missing_format(dtype):
        raise InvalidRequestError.of_field(field, reason)
