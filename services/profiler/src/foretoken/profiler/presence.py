"""Whether a kernel can run on a device: what is installed there, what torch has for it."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# What a kernel raises that a build of torch or a device does not have.
_ABSENT = (RuntimeError, NotImplementedError, AttributeError, TypeError, ImportError)

IsPresent = Callable[[torch.device], bool]


def is_cuda(device: torch.device) -> bool:
    """Return whether the device is a GPU."""
    return str(device.type) == "cuda"


def has_capability(major: int) -> IsPresent:
    """Return whether a device is a GPU of that compute capability or a newer one."""

    def is_present(device: torch.device) -> bool:
        return is_cuda(device) and int(torch.cuda.get_device_capability(device)[0]) >= major

    return is_present


def has_library(name: str) -> IsPresent:
    """Return whether a device is a GPU and a library of GPU kernels is installed."""
    return lambda device: is_cuda(device) and _is_installed(name)


def runs(attempt: Callable[[torch.device], object]) -> IsPresent:
    """Return whether a small call works on a device; it is tried once per device."""

    @cache
    def is_present(device: torch.device) -> bool:
        try:
            attempt(device)
            if is_cuda(device):
                torch.cuda.synchronize(device)
        except _ABSENT:
            return False
        return True

    return is_present


def library(name: str) -> Any:
    """Return a module of a library that need not be installed, once a kernel wants to run it."""
    return importlib.import_module(name)


@cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
