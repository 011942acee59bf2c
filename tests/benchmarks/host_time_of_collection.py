"""Time of a collection of Python's garbage in a process that trains: where recipes collect by hand.

Run: python tests/benchmarks/host_time_of_collection.py [FOLDER ...]

A framework that switches Python's own collection off (Megatron-Core's `--manual-gc`) collects all
garbage every so many steps, between two of them. That takes the longer the more objects there are,
most of which are those of imported packages. Prints how many there are, and the least processor
time of a collection, after each import: PyTorch, then Transformers and Megatron-Core where they are
installed or in one of the folders. No device and no model is needed.
"""

import contextlib
import gc
import importlib
import io
import sys
import time
import warnings

# Modules that a training script imports, by what they belong to.
_IMPORTS = (
    ("PyTorch", ("torch", "torch._dynamo")),
    ("Transformers", ("transformers",)),
    ("Megatron-Core", ("megatron.core", "megatron.core.transformer", "megatron.core.models.gpt")),
)
_RUNS = 10
_MS_PER_S = 1e3


def main(folders: list[str]) -> None:
    """Print the time of a collection after each import."""
    sys.path[:0] = folders
    warnings.simplefilter("ignore")
    for label, names in _IMPORTS:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                for name in names:
                    importlib.import_module(name)
        except ImportError as err:
            sys.stdout.write(f"skipped: {label}: {err}\n")
            continue
        times_ms = [_collect_ms() for _ in range(_RUNS)]
        sys.stdout.write(
            f"with {label}: {len(gc.get_objects()):,} objects, {min(times_ms):.0f} ms\n"
        )


def _collect_ms() -> float:
    started_s = time.process_time()
    gc.collect()
    return (time.process_time() - started_s) * _MS_PER_S


if __name__ == "__main__":
    main(sys.argv[1:])
