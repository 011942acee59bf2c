"""Arrays by their address in memory, for compiled code and for the same code in plain Python."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from foretoken.simulator.engine.layout import Records
from foretoken.simulator.jit import IS_COMPILED


def _to_pointer(_typing: Any, address: Any) -> Any:
    """Take a number for an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


@lru_cache(maxsize=1024)
def _interpret(address: int, shape: int | tuple[int, ...], dtype: Any) -> Records:
    """Return the memory at an address as an array, for plain Python."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


# (address) -> pointer, and (pointer, shape, dtype) -> array.
pointer: Any = intrinsic(_to_pointer) if IS_COMPILED else int
array_at: Callable[[Any, Any, Any], Records] = cast("Any", carray) if IS_COMPILED else _interpret
