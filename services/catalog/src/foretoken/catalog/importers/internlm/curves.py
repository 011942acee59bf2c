"""The curves in a `data.pt`: scipy interpolators by name, of which the measured points are kept."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.catalog.array import Floats
from foretoken.catalog.importers.internlm.symbolic_pickle import Call, Global, read_pickle
from foretoken.catalog.sources.content import read_zip_members
from foretoken.catalog.sources.file import SourceFile, refuse

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
