"""What an estimate rests on where nothing like it was measured on the device asked about."""

import math
from dataclasses import dataclass

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.operators.spec.operator import OperatorSpec

# The least uncertainty about a device never measured. Source: leaving one of five devices out, the
# middle half of operators is predicted within 10 to 45 %.
UNMEASURED_DEVICE_LOG = math.log(1.3)

# In addition to collectives, operators whose kernels are written anew for every architecture: what
# one reaches of its data sheet says little of the next.
_UNTELLABLE_GROUPS = frozenset({"moe"})


def name_place(device: str, framework: str) -> str:
    """Return where kernels ran, in words, which without a framework is what they begin with."""
    return f"{device} under {framework}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """The measurements that a typical efficiency was learned from; none of them for the default.

    `operators` and `devices` are names, `architectures` those of the devices. What a kind of
    operators shows, `is_of_kind`, answers for those that were not measured as they are asked for.
    `apart` names where kernels of another kind ran, which taught nothing, and `apart_log` how many
    times as long they take at most, in log units.
    """

    operators: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    is_of_kind: bool = False
    apart: tuple[str, ...] = ()
    apart_log: float = 0.0

    def has_measured(self, spec: OperatorSpec) -> bool:
        """Tell whether the very operator was measured, not only others."""
        return spec.name in self.operators and not self.is_of_kind

    def can_tell(self, spec: OperatorSpec, device: DeviceSpec) -> bool:
        """Tell whether measurements elsewhere say much of an operator on a device.

        MoE and collectives can only be estimated from the same operator on the same architecture.
        """
        if not (spec.is_collective or spec.group in _UNTELLABLE_GROUPS):
            return True
        return self.has_measured(spec) and device.architecture in self.architectures

    def sets_apart(self, device: DeviceSpec, framework: str) -> bool:
        """Tell whether a device ran kernels of another kind under a framework."""
        return name_place(device.name, framework) in self.apart

    def has_apart_alone(self, device: DeviceSpec) -> bool:
        """Tell whether all that a device ran were kernels of another kind."""
        place = name_place(device.name, "")
        return device.name not in self.devices and any(it.startswith(place) for it in self.apart)

    def describe(self, spec: OperatorSpec, device: DeviceSpec) -> str:
        """Say in words what an estimate of an operator on a device rests on."""
        basis = self._name_measurements(spec, device)
        if self.apart:
            basis += f", but for slower kernels of {', '.join(self.apart)}"
        if self.can_tell(spec, device):
            return basis
        return (
            f"{basis}; {spec.name} on an architecture where nobody measured it "
            f"({device.architecture}) cannot be estimated without a measurement"
        )

    def _name_measurements(self, spec: OperatorSpec, device: DeviceSpec) -> str:
        if not self.operators:
            return "the roofline alone"
        num_others = len(set(self.devices) - {device.name})
        kind = device.kind.upper() if num_others == 1 else f"{device.kind.upper()}s"
        elsewhere = f"{num_others} other {kind}"
        if not self.has_measured(spec):
            return f"other operators of {elsewhere if num_others else 'this device'}"
        places = [elsewhere] if num_others else []
        if device.name in self.devices:
            # What is asked has no model of its own, so it must differ in one of these.
            places.append("this device in another number format, pass or topology")
        return f"{spec.name} on {' and '.join(places)}"
