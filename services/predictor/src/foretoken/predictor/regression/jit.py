"""Compile inner loops to machine code, kept on disk between processes where that can be."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return the function compiled when first called; dividing by zero is no error in it."""
    try:
        made = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:
        # No folder to keep the machine code in: neither beside the source nor of the user.
        made = numba.njit(error_model="numpy")(function)
    return cast("Callable[_Arguments, _Result]", made)
