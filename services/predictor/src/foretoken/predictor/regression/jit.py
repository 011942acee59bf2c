"""Compile inner loops to machine code, kept on disk between processes where that can be."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core.registry import cpu_target

from foretoken.domain.source_hash import compiled_name
from foretoken.jobs.process_setup import spare_numba_scipy

spare_numba_scipy()

# What machine code rests on in addition to the sources: versions, and the processor as numba names
# it.
_CODEGEN: Any = cpu_target.target_context.codegen()
_COMPILER = (
    *(f"{name} {version(name)}" for name in ("numba", "llvmlite", "numpy")),
    *map(str, _CODEGEN.magic_tuple()),
)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return the function compiled when first called; dividing by zero is no error in it.

    It runs without the lock of the interpreter, which it does not need: a table of 100,000 rows
    would keep all other calls of the process from being answered for a sixth of a second.

    numba keeps machine code by the function's name and looks only at its own file, so the name says
    which sources it was compiled from.
    """
    function.__qualname__ = compiled_name(function, *_COMPILER)
    try:
        made = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:
        # No folder to keep the machine code in: neither next to the source nor of the user.
        made = numba.njit(nogil=True, error_model="numpy")(function)
    return cast("Callable[_Arguments, _Result]", made)
