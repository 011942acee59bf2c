"""What a process of ours sets before it imports much: threads of libraries, the collector."""

import gc
import os
from collections.abc import Mapping

# One thread of numerical libraries: theirs turn in circles while they wait for each other, which
# takes six times the CPU time where matrices are small, and processes are as many as cores.
ONE_THREAD: Mapping[str, str] = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
# Objects made between two looks for those that only refer to each other; Python's own number is
# 700. What is imported stays, and is gone through again and again while more comes: a tenth of the
# time until a command answers.
_NUM_OBJECTS = 100_000


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


def collect_rarely() -> None:
    """Let this process look for objects to free after many were made, not after few.

    Not a service, which goes on and has to give memory back.
    """
    gc.set_threshold(_NUM_OBJECTS)
