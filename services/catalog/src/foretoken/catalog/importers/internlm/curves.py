"""The curves in a `data.pt`: a pickle read as data, of which measured points are kept.

A pickle is a program for a small machine that imports names and calls them. This machine keeps
symbols instead: a global is its name, a call is the name with its arguments. No class is looked up,
so no pickle, however it is made, runs code here. Source of the opcodes: Python's pickletools.
"""

import math
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.catalog.dims import Floats
from foretoken.catalog.sources.content import read_zip_members
from foretoken.catalog.sources.file import SourceFile, refuse

# A million opcodes are read in about two seconds; profiles have some ten thousand.
_OPCODES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        """Return the dotted name."""
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Call:
    """An object that the pickle would make: what it would call, and the state it would set."""

    function: Any
    arguments: tuple[Any, ...]
    state: Any = field(default=None, repr=False)


def read_pickle(content: bytes, path: Path, known: frozenset[str]) -> Any:
    """Return what a pickle describes: plain values, dicts, lists, tuples and `Call` objects.

    Only globals in `known` (dotted names) and their attributes may occur, and dict keys must be
    text.

    Raises:
        InvalidRequestError: the pickle is damaged, endless, names another global, or has an opcode
            that values of this kind do not need.

    """
    machine = _Machine(path, known)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count > _OPCODES_MAX:
                refuse(path, f"a pickle of more than {_OPCODES_MAX} opcodes")
            machine.step(opcode.name, argument)
        return machine.result()
    except (ValueError, IndexError, KeyError, TypeError, struct.error) as err:
        refuse(path, f"a damaged pickle: {err}")


class _Machine:
    """The stack, the marks in it, and the memo."""

    def __init__(self, path: Path, known: frozenset[str]) -> None:
        self._path = path
        self._known = known
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in _SILENT:
            refuse(self._path, f"a pickle with the opcode {name}, which profiles do not need")

    def result(self) -> Any:
        """Return the one value left."""
        (value,) = self._stack
        return value

    def mark(self, _argument: Any) -> None:
        self._marks.append(len(self._stack))

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def memoize(self, _argument: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def name_global(self, argument: str) -> None:
        self._push_global(*argument.split(" "))

    def stack_global(self, _argument: Any) -> None:
        module, name = self._pop(2)
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a global whose name is no text")
        self._push_global(module, name)

    def call(self, _argument: Any) -> None:
        function, arguments = self._pop(2)
        if not isinstance(arguments, tuple):
            raise TypeError("a call without arguments")
        self._stack.append(Call(function, arguments))

    def set_state(self, _argument: Any) -> None:
        (state,) = self._pop(1)
        target = self._stack[-1]
        if not isinstance(target, Call):
            raise TypeError("a state for what has none")
        target.state = state

    def set_item(self, _argument: Any) -> None:
        self._update(self._pop(2))

    def set_items(self, _argument: Any) -> None:
        self._update(self._pop_to_mark())

    def append(self, _argument: Any) -> None:
        self._extend(self._pop(1))

    def append_all(self, _argument: Any) -> None:
        self._extend(self._pop_to_mark())

    def make_tuple(self, _argument: Any) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def make_short_tuple(self, length: int) -> None:
        self._stack.append(tuple(self._pop(length)))

    def _push_global(self, module: str, name: str) -> None:
        found = Global(module, name)
        # Newer pickles name a method of a known class at once.
        if f"{module}.{name.partition('.')[0]}" not in self._known:
            refuse(self._path, f"a pickle that requests {found}, which profiles do not need")
        self._stack.append(found)

    def _pop(self, count: int) -> list[Any]:
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise IndexError("an empty stack")
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _update(self, pairs: list[Any]) -> None:
        keys, values = pairs[::2], pairs[1::2]
        target = self._stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, str) for key in keys):
            raise TypeError("items that are not text to value, or for what is no dict")
        target.update(zip(keys, values, strict=True))

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise TypeError("items for what is no list")
        target.extend(values)


_SILENT = frozenset({"PROTO", "FRAME", "STOP"})
_VALUES = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    }
)
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_ACTIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.name_global,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.set_state,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.append_all,
    "TUPLE": _Machine.make_tuple,
    "TUPLE1": lambda machine, _: machine.make_short_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_short_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_short_tuple(3),
}


_ZIP_START = b"PK"
_MEMBER = "data.pkl"
# scipy and numpy moved these; the pickle of an interpolator names some of them.
_CURVES = frozenset(
    {"scipy.interpolate._interpolate.interp1d", "scipy.interpolate.interpolate.interp1d"}
)
_ARRAYS = frozenset({"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"})
_DTYPE = "numpy.dtype"
_ENCODE = "_codecs.encode"
_UNUSED = frozenset(
    {
        "collections.OrderedDict",
        "numpy.ndarray",
        "numpy.float64",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "scipy.interpolate._bsplines.BSpline",
        "scipy._lib.array_api_compat.numpy._aliases.asarray",
        "builtins.getattr",
        "__builtin__.getattr",
    }
)
_KNOWN = _CURVES | _ARRAYS | _UNUSED | {_DTYPE, _ENCODE}
_DTYPES = frozenset({"f4", "f8", "i4", "i8"})


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured points, by ascending x."""

    x: Floats
    y: Floats


def read_curves(source: SourceFile, path: Path) -> Mapping[str, Curve]:
    """Return the curves of a file by name; nothing in it is run.

    Raises:
        InvalidRequestError: it is no such file, or holds what curves do not need.

    """
    content = source.content
    if content.startswith(_ZIP_START):
        members = read_zip_members(source, path)
        found = [name for name in members if name.rsplit("/", 1)[-1] == _MEMBER]
        if len(found) != 1:
            refuse(path, f"a ZIP file without one {_MEMBER}: not written by torch.save")
        content = members[found[0]]
    described = read_pickle(content, path, _KNOWN)
    if not isinstance(described, dict):
        refuse(path, "holds no dict of curves")
    return {name: _curve_of(value, f"{path}: {name}") for name, value in described.items()}


def _curve_of(value: Any, place: str) -> Curve:
    where = Path(place)
    if not _is_call(value, _CURVES):
        refuse(where, "not an interp1d")
    # A class with slots has two states: of its dict, and of its slots.
    states = value.state if isinstance(value.state, tuple) else (value.state,)
    fields = {
        key: item for state in states if isinstance(state, dict) for key, item in state.items()
    }
    x, y = (_array_of(fields.get(key), where) for key in ("x", "y"))
    if x.ndim != 1 or x.shape != y.shape or not np.isfinite([x, y]).all():
        refuse(where, "its x and y are not as many finite numbers")
    return Curve(x, y)


def _array_of(value: Any, where: Path) -> Floats:
    """Return the array that numpy would make; its state is (version, shape, type, order, data)."""
    if not _is_call(value, _ARRAYS):
        refuse(where, "its points are not a numpy array")
    try:
        _, shape, dtype, is_fortran, data = value.state
        raw = _bytes_of(data)
        kind = np.dtype(dtype.state[1].replace("|", "=") + _dtype_name(dtype))
    except (TypeError, ValueError, AttributeError, IndexError) as err:
        refuse(where, f"an array that cannot be read: {err}")
    if math.prod(shape) * kind.itemsize != len(raw) or is_fortran:
        refuse(where, "an array of another size than its data")
    return np.frombuffer(raw, kind).reshape(shape).astype(np.float64)


def _dtype_name(dtype: Any) -> str:
    if not _is_call(dtype, frozenset({_DTYPE})) or dtype.arguments[0] not in _DTYPES:
        raise ValueError("its numbers are neither floats nor integers")
    return str(dtype.arguments[0])


def _bytes_of(data: Any) -> bytes:
    """Return the bytes of an array; protocols before 3 write them as Latin-1 text."""
    if isinstance(data, bytes):
        return data
    if not _is_call(data, frozenset({_ENCODE})) or data.arguments[1:] != ("latin1",):
        raise ValueError("its data is not bytes")
    return str(data.arguments[0]).encode("latin1")


def _is_call(value: Any, names: frozenset[str]) -> bool:
    return (
        isinstance(value, Call)
        and isinstance(value.function, Global)
        and str(value.function) in names
    )
