"""Say what machine and software a run was measured on."""

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.profiler.local_device import LocalDevice

FRAMEWORK = "torch"

_MW_PER_W = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReading:
    """Power and clock of a device at a moment; None where it does not tell."""

    power_w: float | None = None
    clock_mhz: float | None = None


def framework_version() -> str:
    """Return the version of the framework that runs the kernels."""
    return str(torch.__version__)


def describe_environment(device: LocalDevice) -> dict[str, str]:
    """Return what the numbers depend on, as short strings."""
    described = {
        "framework": FRAMEWORK,
        "framework_version": framework_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_capability": str(torch.backends.cpu.get_cpu_capability()),
        "num_cpus": str(os.cpu_count() or 0),
        "num_threads": str(torch.get_num_threads()),
        "device": device.name,
        "num_devices": str(device.num_present),
    }
    if device.is_cuda:
        properties = torch.cuda.get_device_properties(device.torch_device)
        described |= {
            "gpu": properties.name,
            "gpu_memory_bytes": str(properties.total_memory),
            "gpu_num_sms": str(properties.multi_processor_count),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "driver": _driver_version(),
        }
    return described


def read_device(device: LocalDevice) -> DeviceReading:
    """Return the device's present power and clock, where its driver library is installed."""
    if not device.is_cuda:
        return DeviceReading()
    power_w = clock_mhz = None
    # torch asks NVML, whose Python binding is optional, whose errors are plain exceptions of a
    # module that may not be there, and which not every board answers.
    with contextlib.suppress(Exception):
        power_w = torch.cuda.power_draw(device.torch_device) / _MW_PER_W
        clock_mhz = float(torch.cuda.clock_rate(device.torch_device))
    return DeviceReading(power_w=power_w, clock_mhz=clock_mhz)


def free_memory_bytes(device: LocalDevice) -> float:
    """Return the memory a case may still take."""
    if device.is_cuda:
        return float(torch.cuda.mem_get_info(device.torch_device)[0])
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def last_cache_bytes(device: LocalDevice, device_spec: DeviceSpec) -> float:
    """Return the size of the device's last cache, which rotating inputs must exceed.

    A CPU's own, where the system tells: the `cpu` device stands for any.
    """
    if device.is_cuda:
        return device_spec.l2_cache_bytes
    sizes_kib = [
        int(line.removesuffix("K"))
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        for line in _read_lines(path)
        if line.endswith("K")
    ]
    return max(sizes_kib) * 1024.0 if sizes_kib else device_spec.l2_cache_bytes


def _cpu_name() -> str:
    for line in _read_lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver_version() -> str:
    for line in _read_lines(Path("/proc/driver/nvidia/version")):
        if line.startswith("NVRM version:"):
            return line.partition(":")[2].strip()
    return ""


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
