"""Say what machine and software a run was measured on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.timing.nvml import open_nvml

FRAMEWORK = "torch"

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReading:
    """State of a device while a case was timed; None where it does not tell.

    `throttle` names what held the clock down, joined by commas; empty when nothing did.
    """

    power_w: float | None = None
    clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle: str | None = None


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
        nvml = open_nvml(device.torch_device)
        described |= nvml.describe() if nvml else {}
    elif governor := _read_lines(_GOVERNOR):
        described["cpu_governor"] = governor[0]
    return described


def cpu_clock_mhz() -> float | None:
    """Return the clock of the fastest core just now, where the system tells."""
    clocks = [
        float(line.partition(":")[2])
        for line in _read_lines(Path("/proc/cpuinfo"))
        if line.startswith("cpu MHz")
    ]
    return max(clocks, default=None)


def free_memory_bytes(device: LocalDevice) -> float:
    """Return the memory a case may still take, with what torch holds and does not use."""
    if device.is_cuda:
        where = device.torch_device
        unused = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        return float(torch.cuda.mem_get_info(where)[0] + unused)
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def last_cache_bytes(device: LocalDevice, device_spec: DeviceSpec) -> float:
    """Return the size of the device's last cache, which rotating inputs must exceed.

    A CPU's own, where the system tells: the `cpu` device stands for any. Of a GPU the larger of
    what its file and its driver say: drivers count what data sheets leave out.
    """
    if device.is_cuda:
        return max(device_spec.l2_cache_bytes, _l2_cache_bytes(device))
    sizes_kib = [
        int(line.removesuffix("K"))
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        for line in _read_lines(path)
        if line.endswith("K")
    ]
    return max(sizes_kib) * 1024.0 if sizes_kib else device_spec.l2_cache_bytes


def _l2_cache_bytes(device: LocalDevice) -> float:
    if not torch.cuda.is_available():
        return 0.0
    # Releases of torch name it, or do not.
    properties = torch.cuda.get_device_properties(device.torch_device)
    return float(getattr(properties, "L2_cache_size", 0))


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
