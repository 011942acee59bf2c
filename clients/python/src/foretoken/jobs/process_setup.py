"""What a process of ours sets before it imports much: threads of libraries, the collector."""

import gc
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

# One thread of numerical libraries: theirs turn in circles while they wait for each other, which
# takes six times the CPU time where matrices are small, and processes are as many as cores.
ONE_THREAD: Mapping[str, str] = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
# Objects made between two looks for those that only refer to each other; Python's own number is
# 700. What is imported stays, and is gone through again and again while more comes: a tenth of the
# time until a command answers.
_NUM_OBJECTS = 100_000
# Whether `take_as_ours` was called.
_OURS: list[bool] = []


def take_as_ours() -> None:
    """Say that nobody's code but ours and plugins' runs in this process."""
    _OURS.append(True)


def is_of_ours() -> bool:
    """Whether nobody else is surprised if libraries are imported without what we do not use."""
    return bool(_OURS)


def use_one_thread() -> None:
    """Give numerical libraries one thread, unless the environment says how many; before numpy."""
    if not ONE_THREAD.keys() & os.environ.keys():
        os.environ.update(ONE_THREAD)


def return_memory() -> None:
    """Let Arrow take memory from the system's allocator, unless the environment names another.

    Before pyarrow is imported. Arrow's own keeps what it was given back: a sixth of the memory of a
    large import.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def spare_numba_scipy() -> None:
    """Import what numba needs for any machine code without scipy's linear algebra.

    numba looks for that as its rules for arrays are imported, though only `np.cov` and
    `np.corrcoef` need it there: a tenth of the time that a worker takes to start.
    """
    linalg: Any = import_module("numba.np.linalg")
    look = getattr(linalg, "ensure_blas", None)
    if look is None:  # Another release looks elsewhere.
        return
    linalg.ensure_blas = _find_none
    try:
        import_module("numba.np.arraymath")
    finally:
        linalg.ensure_blas = look


def _find_none() -> None:
    raise ImportError


def collect_rarely() -> None:
    """Let this process look for objects to free after many were made, not after few.

    Not a service, which goes on and has to give memory back.
    """
    gc.set_threshold(_NUM_OBJECTS)
