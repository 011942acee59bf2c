"""How many processes can run at once on this machine."""

import math
import os
from pathlib import Path

_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def count_cores(quota_file: Path = _QUOTA_FILE) -> int:
    """Return the cores this process may use, as a container's limit and its affinity allow."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return max(min(num_cores, _read_quota(quota_file)), 1)


def _read_quota(path: Path) -> int:
    """Return the whole cores of a control group's quota, "<microseconds> <of so many>" or "max"."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return os.cpu_count() or 1
