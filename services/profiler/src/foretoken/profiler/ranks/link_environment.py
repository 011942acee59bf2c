"""Say what the times of collectives depend on: the libraries, their settings, the links."""

import os
from collections.abc import Mapping

import torch
from torch import distributed

from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.timing.nvml import open_nvml

# Variables that choose algorithms, protocols, interfaces or how ranks reach each other.
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_")


def describe_links(
    device: LocalDevice, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what the times of collectives on a device depend on, as short strings.

    `environment` are the variables to look at (none: this process's own).
    """
    variables = os.environ if environment is None else environment
    described = {
        name.lower(): value
        for name, value in sorted(variables.items())
        if name.startswith(_PREFIXES)
    }
    if not device.is_cuda:
        return {"collective_library": "gloo", **described}
    if distributed.is_nccl_available():
        version = torch.cuda.nccl.version()
        described["nccl"] = ".".join(str(part) for part in version if part != "")
    return {
        "collective_library": "nccl",
        "peer_access": _describe_peer_access(torch.cuda.device_count()),
        "nvlinks_per_device": _count_nvlinks(device),
        **described,
    }


def _describe_peer_access(num_devices: int) -> str:
    """Return which pairs of devices can read each other's memory."""
    pairs = [
        (first, second)
        for first in range(num_devices)
        for second in range(num_devices)
        if first != second
    ]
    able = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    if len(able) in (0, len(pairs)):
        return "all" if able else "none"
    return " ".join(f"{first}-{second}" for first, second in able)


def _count_nvlinks(device: LocalDevice) -> str:
    """Return how many NVLinks of a device are active; empty where the driver does not tell."""
    nvml = open_nvml(device.torch_device)
    count = nvml.nvlink_count() if nvml else None
    return "" if count is None else str(count)
