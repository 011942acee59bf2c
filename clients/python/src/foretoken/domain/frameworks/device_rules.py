"""What a serving engine sets by itself on a device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRules:
    """What an engine sets by itself on devices of at least so much memory, in GiB.

    `architectures` (empty: all) are those it is for, `except_devices` names that it is not;
    `least_tp` is the tensor parallelism it takes. Of the device's memory the engine leaves
    `spare_mib` to what its `memory_utilization_ratio` is not for (0: the ratio is a rule).
    """

    least_gib: float
    rules: Mapping[str, Any]
    least_tp: int = 1
    spare_mib: float = 0.0
    architectures: tuple[str, ...] = ()
    except_devices: tuple[str, ...] = ()

    def holds_for(self, device: DeviceSpec, tp: int) -> bool:
        """Whether a device, and a tensor parallelism, is one of them."""
        return (
            device.memory_bytes >= self.least_gib * GIB
            and tp >= self.least_tp
            and device.architecture in (self.architectures or (device.architecture,))
            and device.name not in self.except_devices
        )

    def list_rules(self, device: DeviceSpec) -> Mapping[str, Any]:
        """Return the rules on a device."""
        if not self.spare_mib:
            return self.rules
        ratio = 1 - self.spare_mib * 2**20 / device.memory_bytes
        return {**self.rules, "memory_utilization_ratio": round(ratio, 3)}
