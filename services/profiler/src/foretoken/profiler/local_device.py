"""The devices of this machine, by the names of the device files."""

import logging
from dataclasses import dataclass

import torch

from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import DeviceNotPresentError, UnknownDeviceError
from foretoken.domain.hardware.device import find_device

_log = logging.getLogger(__name__)

CPU = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalDevice:
    """One kind of device present here: its name, how torch addresses it, and how many there are."""

    name: str
    torch_name: str
    vendor_name: str = ""
    num_present: int = 1

    @property
    def torch_device(self) -> torch.device:
        """The device to put tensors on."""
        return torch.device(self.torch_name)

    @property
    def is_cuda(self) -> bool:
        """Whether this is a CUDA GPU."""
        return self.torch_name != CPU


def list_local_devices() -> tuple[LocalDevice, ...]:
    """Return the CPU and every kind of known CUDA GPU; a GPU without a device file is logged."""
    found: dict[str, LocalDevice] = {CPU: LocalDevice(name=CPU, torch_name=CPU)}
    for index in range(torch.cuda.device_count()):
        vendor_name = torch.cuda.get_device_name(index)
        try:
            name = find_device(vendor_name).name
        except UnknownDeviceError as err:
            _log.warning("device=%r index=%d skipped: %s", vendor_name, index, err.message)
            continue
        first = found.get(name)
        found[name] = LocalDevice(
            name=name,
            torch_name=first.torch_name if first else f"cuda:{index}",
            vendor_name=vendor_name,
            num_present=first.num_present + 1 if first else 1,
        )
    return tuple(found.values())


def find_local_device(name: str) -> LocalDevice:
    """Return the local device of that name or vendor name.

    Raises:
        DeviceNotPresentError: this machine has none; the message lists what it has.

    """
    present = list_local_devices()
    own_name = canonical_device(name)
    for device in present:
        if own_name == device.name:
            return device
    names = ", ".join(device.name for device in present)
    raise DeviceNotPresentError(
        f"the profiler's machine has no {name!r}; it has {names}", device=name, present=names
    )
