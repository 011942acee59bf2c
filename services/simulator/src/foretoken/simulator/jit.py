"""Compile numeric functions with numba, and keep what was compiled where that is possible.

With `FORETOKEN_JIT=0` in the environment the same functions run as plain Python, some hundred times
slower: for a debugger, for print, for one who wants to see what a step does.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

from foretoken.domain.source_hash import compiled_name
from foretoken.jobs.process_setup import spare_numba_scipy

P = ParamSpec("P")
R = TypeVar("R")

IS_COMPILED = os.environ.get("FORETOKEN_JIT", "1") != "0"


def _take_shipped() -> None:
    """Copy the machine code that an image was made with to where this process keeps its own.

    numba keeps code only in a folder that it can write to, and an image's files may be read only.
    `FORETOKEN_COMPILED` names the folder in the image.
    """
    shipped, kept = os.environ.get("FORETOKEN_COMPILED"), os.environ.get("NUMBA_CACHE_DIR")
    if not (shipped and kept and Path(shipped).is_dir()) or Path(kept).exists():
        return
    # At once as a whole, for other processes start too; without room everything is compiled.
    with suppress(OSError):
        Path(kept).parent.mkdir(parents=True, exist_ok=True)
        copy = Path(mkdtemp(dir=Path(kept).parent, prefix="compiled-"))
        try:
            shutil.copytree(shipped, copy, dirs_exist_ok=True)
            copy.rename(kept)
        finally:
            shutil.rmtree(copy, ignore_errors=True)


_take_shipped()


if IS_COMPILED:
    spare_numba_scipy()

# What machine code rests on besides the sources: versions, and the processor as numba names it.
_CODEGEN: Any = cpu_target.target_context.codegen()
_COMPILER = (
    *(f"{name} {version(name)}" for name in ("numba", "llvmlite", "numpy")),
    *map(str, _CODEGEN.magic_tuple()),
)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function compiled on its first call.

    It runs concurrent with other threads, without the lock of the interpreter, which it does not
    need. The machine code is kept next to the module or in the user's cache, for the next process;
    where neither can be written it is compiled anew in each. numba keeps it by the function's name
    and looks only at its own file, so the name says which sources it was compiled from: all that
    its module imports, for constants are compiled in.
    """
    if not IS_COMPILED:
        return _interpreted(function)
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
    if not IS_COMPILED:
        return function
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast("Callable[P, R]", numba.njit(error_model="numpy", **options)(function))


def _interpreted(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with numbers as machine code has them: they wrap around, and divide."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return run


def is_ready(function: Callable[..., Any]) -> bool:
    """Whether a compiled function need not be compiled any more: it was here, or is kept."""
    if not IS_COMPILED:
        return True
    made = cast("Any", function)
    return bool(made.signatures) or _is_kept(made.py_func)


def can_keep(function: Callable[..., Any]) -> bool:
    """Whether there is a folder that keeps a function's machine code for other processes."""
    return _kept_in(cast("Any", function).py_func) is not None


def _kept_in(function: Callable[..., Any]) -> Path | None:
    try:
        return Path(cast("Any", FunctionCache)(function).cache_path)
    except RuntimeError:
        return None


def _is_kept(function: Callable[..., Any]) -> bool:
    name = function.__qualname__.replace("<", "").replace(">", "")
    folder = _kept_in(function)
    return folder is not None and any(folder.glob(f"*.{name}-*.nbi"))


class Addressed(Generic[P, R]):
    """A function that compiled code calls by its address, compiled when that is first asked for.

    What calls it is compiled without it. Interpreted, the address is its place among all of them.
    """

    by_place: ClassVar[list[Callable[..., Any]]] = []

    def __init__(self, function: Callable[P, R], signature: Any) -> None:
        if IS_COMPILED:
            function.__qualname__ = compiled_name(function, *_COMPILER)
        self._function = function
        self._signature = signature
        self._made: Any = None
        self._place = len(self.by_place)
        self.by_place.append(function)

    @property
    def address(self) -> int:
        """Where its machine code is."""
        if not IS_COMPILED:
            return self._place
        self.compile()
        return int(self._made.address)

    def compile(self) -> None:
        """Compile it, or load it where that was done before."""
        if self._made is not None or not IS_COMPILED:
            return
        try:
            make = numba.cfunc(self._signature, cache=True, error_model="numpy")
            self._made = make(self._function)
        except RuntimeError:  # no folder to keep it in
            self._made = numba.cfunc(self._signature, error_model="numpy")(self._function)

    @property
    def is_ready(self) -> bool:
        """Whether it need not be compiled any more."""
        return not IS_COMPILED or self._made is not None or _is_kept(self._function)
