"""Exact accelerator products and their physical limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError
from foretoken.domain.estimate import DType
from foretoken.domain.hardware.sourced import load_sourced


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One device product.

    `peak_flops_per_s` is dense (no sparsity), per dtype, from the vendor's data sheet.
    `launch_latency_us` is the shortest time a kernel takes on the device, the floor of any latency.
    `sustained_flops_ratio` is the share of the peak that large matrix products keep up as long as a
    training step lasts, where a document says so: power limits some devices far below what short
    measurements reach (0: not known).
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
    vendor_names: tuple[str, ...] = ()

    def peak_flops(self, dtype: DType) -> float:
        """Return FLOP/s of a dtype; one the device lacks runs at the next wider one it has.

        Raises:
            InvalidRequestError: the device computes in no format as wide as this one.

        """
        for candidate in _WIDER[dtype]:
            if candidate in self.peak_flops_per_s:
                return self.peak_flops_per_s[candidate]
        raise InvalidRequestError.of_field("dtype", f"{self.name} cannot compute in {dtype.name}")


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
