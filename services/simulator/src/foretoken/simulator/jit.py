"""Compile numeric functions with numba, and keep what was compiled where that is possible."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numba
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

from foretoken.domain.source_hash import compiled_name

P = ParamSpec("P")
R = TypeVar("R")

# What machine code rests on beside the sources: versions, and the processor as numba names it.
_CODEGEN: Any = cpu_target.target_context.codegen()
_COMPILER = (
    *(f"{name} {version(name)}" for name in ("numba", "llvmlite", "numpy")),
    *map(str, _CODEGEN.magic_tuple()),
)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function compiled on its first call.

    It runs beside other threads, without the lock of the interpreter, which it does not need. The
    machine code is kept beside the module or in the user's cache, for the next process; where
    neither can be written it is compiled anew in each. numba keeps it by the function's name and
    looks only at its own file, so the name says which sources it was compiled from: all that its
    module imports, for constants are compiled in.
    """
    function.__qualname__ = compiled_name(function, *_COMPILER)
    try:
        made = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no folder to keep it in
        made = numba.njit(nogil=True, error_model="numpy")(function)
    return cast("Callable[P, R]", made)


def compiled_part(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function compiled into those that call it; Python cannot call it.

    Without a way in from Python and machine code of its own to keep it compiles much faster.
    """
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast("Callable[P, R]", numba.njit(error_model="numpy", **options)(function))


def is_ready(function: Callable[..., Any]) -> bool:
    """Whether a compiled function need not be compiled any more: it was here, or is kept."""
    made = cast("Any", function)
    return bool(made.signatures) or _is_kept(made.py_func)


def _is_kept(function: Callable[..., Any]) -> bool:
    name = function.__qualname__.replace("<", "").replace(">", "")
    try:
        folder = Path(cast("Any", FunctionCache)(function).cache_path)
    except RuntimeError:  # no folder to keep it in
        return False
    return any(folder.glob(f"*.{name}-*.nbi"))


class Addressed(Generic[P, R]):
    """A function that compiled code calls by its address, compiled when that is first asked for.

    What calls it is compiled without it.
    """

    def __init__(self, function: Callable[P, R], signature: Any) -> None:
        function.__qualname__ = compiled_name(function, *_COMPILER)
        self._function = function
        self._signature = signature
        self._made: Any = None

    @property
    def address(self) -> int:
        """Where its machine code is."""
        if self._made is None:
            try:
                make = numba.cfunc(self._signature, cache=True, error_model="numpy")
                self._made = make(self._function)
            except RuntimeError:  # no folder to keep it in
                self._made = numba.cfunc(self._signature, error_model="numpy")(self._function)
        return int(self._made.address)

    @property
    def is_ready(self) -> bool:
        """Whether it need not be compiled any more."""
        return self._made is not None or _is_kept(self._function)
