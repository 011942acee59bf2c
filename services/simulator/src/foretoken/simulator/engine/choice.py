"""The schedulers there are, and how the engine calls the one in use.

By its address: the engine is compiled without schedulers, and each scheduler by itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.simulator.engine.layout import STATE, State
from foretoken.simulator.jit import IS_COMPILED, Addressed

FunctionType: Any = cast("Any", cgutils).ir.FunctionType
Select = Callable[[State, int], int]
_SIGNATURE = types.int64(numba.from_dtype(STATE), types.int64)


def scheduler(select: Select) -> Addressed[[State, int], int]:
    """Make a function one that chooses the batches of an engine, given the state and its number."""
    return Addressed(select, _SIGNATURE)


def list_schedulers() -> Mapping[str, Addressed[[State, int], int]]:
    """Return the plug-ins by name."""
    return scan_modules("foretoken.simulator.engine.schedulers", "select")


def find_scheduler(name: str) -> Addressed[[State, int], int]:
    """Return the plug-in of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    return UnknownPluginError.look_up(name, list_schedulers())


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
