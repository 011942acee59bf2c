"""A GPU that a device file describes, and what times calls on it."""

import os
from pathlib import Path

import pytest
import torch

from foretoken.profiler.config import TimerSpec
from foretoken.profiler.local_device import LocalDevice, list_local_devices
from foretoken.profiler.timing.case import Rig, open_rig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings are no errors here: those of CUDA's libraries differ by release and driver."""
    folder = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def device() -> LocalDevice:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    known = [device for device in list_local_devices() if device.is_cuda]
    if not known:
        pytest.skip("no device file describes this GPU")
    return known[0]


@pytest.fixture(scope="session")
def rig(device: LocalDevice) -> Rig:
    return open_rig(device, TimerSpec(case_s_max=0.3), num_threads=1)
