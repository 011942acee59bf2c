"""How compiled code calls the scheduler in use: by its address, so that no other is compiled."""

from collections.abc import Callable
from typing import Any, cast

import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

from foretoken.simulator.jit import IS_COMPILED, Addressed
from foretoken.simulator.serving.fast.layout import STATE, State

FunctionType: Any = cast("Any", cgutils).ir.FunctionType
Select = Callable[[State, int], int]
_SIGNATURE = types.int64(numba.from_dtype(STATE), types.int64)


def chooses(select: Select) -> Addressed[[State, int], int]:
    """Make a function of state and engine one that chooses batches."""
    return Addressed(select, _SIGNATURE)


def _call(_typing: Any, _address: Any, state: Any, _engine: Any) -> Any:
    """Call what chooses batches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = [context.get_value_type(part) for part in signature.args[1:]]
        made = FunctionType(context.get_value_type(signature.return_type), values)
        pointer = builder.inttoptr(arguments[0], made.as_pointer())
        return builder.call(pointer, arguments[1:])

    return types.int64(types.int64, state, types.int64), generate


def _interpret(place: int, state: State, engine: int) -> int:
    chosen: int = Addressed.by_place[int(place)](state, engine)
    return chosen


call_select: Any = intrinsic(_call) if IS_COMPILED else _interpret
