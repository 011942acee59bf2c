"""Ask NVIDIA's management library what a GPU is doing: clock, power, heat, who else is on it.

Its Python binding (`nvidia-ml-py`) is optional, and boards, drivers and containers refuse some
questions: whatever is not answered is None, and never ends a run.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

try:
    import pynvml
except ImportError:  # pragma: no cover - the extra `profiler` installs it
    pynvml = None

# Bits of the clock event reasons (formerly throttle reasons), by the names rows get. An idle GPU
# and clocks that somebody set are not slowdowns.
# Source: NVML API reference, nvmlClocksEventReasons.
_THROTTLE_NAMES: Mapping[int, str] = MappingProxyType(
    {
        0x0000000000000004: "power_cap",
        0x0000000000000008: "hw_slowdown",
        0x0000000000000010: "sync_boost",
        0x0000000000000020: "thermal",
        0x0000000000000040: "hw_thermal",
        0x0000000000000080: "hw_power_brake",
    }
)
# Those that say something is wrong with the machine; a power cap is how large GPUs work.
SLOWDOWNS = frozenset({"hw_slowdown", "thermal", "hw_thermal", "hw_power_brake"})

_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_TEMPERATURE_OF_GPU = 0
_MW_PER_W = 1e3
# Bound of the links that NVML numbers. Source: nvml.h, NVML_NVLINK_MAX_LINKS.
_MAX_NVLINKS = 18


class NvmlDevice:
    """One GPU, or one MIG part of it, as NVML knows it."""

    def __init__(self, library: Any, handle: Any) -> None:
        """Ask `library` (the module `pynvml`) about the device of that handle."""
        self._library = library
        self._handle = handle
        # A MIG part has processes of its own; clocks, power and heat are the board's.
        is_part = self._ask_of(handle, "nvmlDeviceIsMigDeviceHandle")
        parent = self._ask_of(handle, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
        self._board = parent if is_part and parent is not None else handle

    def power_w(self) -> float | None:
        """Return the power the board draws, averaged over NVML's own period."""
        power_mw = self._ask("nvmlDeviceGetPowerUsage")
        return None if power_mw is None else power_mw / _MW_PER_W

    def sm_clock_mhz(self) -> float | None:
        """Return the present clock of the multiprocessors."""
        clock = self._ask("nvmlDeviceGetClockInfo", _SM_CLOCK)
        return None if clock is None else float(clock)

    def temperature_c(self) -> float | None:
        """Return the present temperature of the chip."""
        # The binding renamed the question; older ones know only the former name.
        degrees = self._ask("nvmlDeviceGetTemperatureV", _TEMPERATURE_OF_GPU)
        if degrees is None:
            degrees = self._ask("nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU)
        return None if degrees is None else float(degrees)

    def throttle_reasons(self) -> tuple[str, ...] | None:
        """Return why the clock is lower than it could be; empty when nothing holds it down."""
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else throttle_names(int(bits))

    def process_ids(self) -> tuple[int, ...] | None:
        """Return the processes that compute on the device, as the host numbers them."""
        processes = self._ask_of(self._handle, "nvmlDeviceGetComputeRunningProcesses")
        return None if processes is None else tuple(sorted(entry.pid for entry in processes))

    def nvlink_count(self) -> int | None:
        """Return how many NVLinks of the board are active."""
        states = [self._ask("nvmlDeviceGetNvLinkState", link) for link in range(_MAX_NVLINKS)]
        known = [state for state in states if state is not None]
        return sum(map(bool, known)) if known else None

    def describe(self) -> dict[str, str]:
        """Return what numbers of this board depend on, as short strings."""
        limit_mw = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        facts = {
            "gpu_power_limit_w": None if limit_mw is None else f"{limit_mw / _MW_PER_W:g}",
            "gpu_clock_mhz_max": self._ask("nvmlDeviceGetMaxClockInfo", _SM_CLOCK),
            "gpu_memory_clock_mhz_max": self._ask("nvmlDeviceGetMaxClockInfo", _MEMORY_CLOCK),
            "gpu_application_clock_mhz": self._ask("nvmlDeviceGetApplicationsClock", _SM_CLOCK),
            "gpu_ecc": _switch(_first(self._ask("nvmlDeviceGetEccMode"))),
            "gpu_mig": _switch(_first(self._ask("nvmlDeviceGetMigMode"))),
            "gpu_persistence": _switch(self._ask("nvmlDeviceGetPersistenceMode")),
            "gpu_vbios": self._ask("nvmlDeviceGetVbiosVersion"),
            "driver": self._call("nvmlSystemGetDriverVersion"),
        }
        return {name: _text(value) for name, value in facts.items() if value is not None}

    def _ask(self, question: str, *arguments: int) -> Any:
        return self._ask_of(self._board, question, *arguments)

    def _ask_of(self, handle: Any, question: str, *arguments: int) -> Any:
        return self._call(question, handle, *arguments)

    def _call(self, question: str, *arguments: Any) -> Any:
        return _call(self._library, question, *arguments)


def open_nvml(device: torch.device, library: Any = pynvml) -> NvmlDevice | None:
    """Return what NVML knows of a CUDA device; None without the binding, the driver or the device.

    The device is found by its UUID: NVML numbers all GPUs of the machine, torch those that
    `CUDA_VISIBLE_DEVICES` lets it see.
    """
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return find_by_uuid(uuid, library)


def find_by_uuid(uuid: str, library: Any) -> NvmlDevice | None:
    """Return the GPU or the MIG part of that UUID, with or without its prefix."""
    if library is None or not uuid:
        return None
    _call(library, "nvmlInit")
    for prefix in ("", "GPU-", "MIG-"):
        handle = _call(library, "nvmlDeviceGetHandleByUUID", prefix + uuid)
        if handle is not None:
            return NvmlDevice(library, handle)
    return None


def throttle_names(bits: int) -> tuple[str, ...]:
    """Return the names of the clock event reasons that are set."""
    return tuple(name for bit, name in _THROTTLE_NAMES.items() if bits & bit)


def other_process_count(listed: Iterable[int], own: int, children: frozenset[int]) -> int:
    """Return how many listed processes are neither `own` nor its children.

    In a container NVML lists the numbers of the host, which say nothing here: this process computes
    on the device and is not on the list. Then one entry is it, and one each its children.
    """
    family = {own} | children
    pids = set(listed)
    if own in pids:
        return len(pids - family)
    return max(0, len(pids) - len(family))


def descendants(pid: int, proc: Path = Path("/proc")) -> frozenset[int]:
    """Return the processes that a process started, and those that they started."""
    parents = {
        int(folder.name): parent
        for folder in proc.glob("[0-9]*")
        if (parent := _parent_of(folder)) is not None
    }
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        born = {child for child, its_parent in parents.items() if its_parent == parent} - found
        found |= born
        waiting.extend(born)
    return frozenset(found)


def _parent_of(folder: Path) -> int | None:
    try:
        # The name of the program may hold blanks and brackets; the fields follow the last one.
        return int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _call(library: Any, question: str, *arguments: Any) -> Any:
    function = getattr(library, question, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except library.NVMLError:
        return None


def _first(pair: Any) -> Any:
    return None if pair is None else pair[0]


def _switch(value: Any) -> str | None:
    return None if value is None else ("on" if value else "off")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
