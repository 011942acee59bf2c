"""What memory a model and its passes may take, and how torch says that there is none left."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from foretoken.domain.errors import DeviceMemoryError
from foretoken.domain.units import GIB
from foretoken.profiler.environment import free_memory_bytes
from foretoken.profiler.local_device import LocalDevice

# What may be taken of the memory that is free: other programs want some, too.
_RATIO_MAX = 0.9
# torch has no error of its own for a CPU without memory.
_CPU_MESSAGES = ("not enough memory", "can't allocate memory", "Cannot allocate memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """Checks before memory is taken where taking too much would kill the process."""

    device: LocalDevice
    free_bytes: Callable[[LocalDevice], float] = free_memory_bytes

    def check(self, needed_bytes: float, what: str) -> None:
        """Check that there is room.

        Raises:
            DeviceMemoryError: there is not; the message says how much is.

        """
        allowed = _RATIO_MAX * self.free_bytes(self.device)
        if needed_bytes > allowed:
            raise DeviceMemoryError(
                f"out of memory: {what} takes {needed_bytes / GIB:.3g} GiB,"
                f" {allowed / GIB:.3g} GiB may be used"
            )

    def check_activations(self, needed_bytes: float, what: str) -> None:
        """Check an estimate of a pass on a CPU. A GPU says itself when it is full."""
        if not self.device.is_cuda:
            self.check(needed_bytes, what)

    def recover(self) -> None:
        """Give back what a failed case held."""
        if self.device.is_cuda:
            torch.cuda.empty_cache()


def memory_reason(err: Exception) -> str:
    """Return why there is no memory left; empty where an error says something else."""
    lines = str(err).strip().splitlines() or [repr(err)]
    if isinstance(err, DeviceMemoryError):
        return err.message
    is_full = isinstance(err, torch.OutOfMemoryError) or any(
        message in lines[0] for message in _CPU_MESSAGES
    )
    return f"out of memory: {lines[0]}" if is_full else ""
