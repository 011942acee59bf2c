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


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """The measurements that a typical efficiency was learned from; none of them for the default.

    `operators` and `devices` are names, `architectures` those of the devices. What a kind of
    operators shows, `is_of_kind`, answers for those that were not measured as they are asked for.
    `apart` has the devices, frameworks and variants of kernels of another kind, which taught
    nothing, and `apart_log` how many times as long they take at most, in log units.
    """

    operators: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    is_of_kind: bool = False
    apart: tuple[tuple[str, str, str], ...] = ()
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

    def slow_kernels(self, device: DeviceSpec) -> tuple[tuple[str, str], ...]:
        """Return the frameworks and variants in which a device ran kernels of another kind."""
        return tuple((where, variant) for name, where, variant in self.apart if name == device.name)

    def describe(self, spec: OperatorSpec, device: DeviceSpec) -> str:
        """Say in words what an estimate of an operator on a device rests on."""
        basis = self._name_measurements(spec, device)
        if self.apart:
            places = dict.fromkeys(f"{name} under {where}" for name, where, _ in self.apart)
            basis += f", but for slower kernels of {', '.join(places)}"
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
