"""A hash of what data says, equal in every process."""

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import foretoken.domain
import foretoken.simulator

# Code, and data that is looked up by name: devices, models, profiles.
_SOURCES = ("**/*.py", "**/*.yaml", "**/*.json")


def fingerprint(*values: Any) -> bytes:
    """Return a hash of plain data, dataclasses, arrays and objects by their state.

    Two values of equal content have equal hashes, whatever memory they share: a pickle's bytes
    depend on that. Functions and classes count by their name.
    """
    digest = hashlib.sha256()
    for value in values:
        _feed(value, digest.update)
    return digest.digest()


@cache
def code_version() -> str:
    """Return the installed version of Foretoken and a hash of its sources that results rest on.

    Results of another version, or of code that was edited since, are not mixed with ours.
    """
    folders = (Path(foretoken.simulator.__file__).parent, Path(foretoken.domain.__file__).parent)
    return "-".join((foretoken.__version__, *map(_hash_sources, folders)))


def _hash_sources(folder: Path) -> str:
    """Return a hash of the sources of a folder, in the order of their paths."""
    paths = sorted({path for pattern in _SOURCES for path in folder.glob(pattern)})
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def _feed(value: Any, update: Callable[[bytes], None]) -> None:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        _put(update, type(value).__name__, repr(value).encode())
    elif isinstance(value, enum.Enum):
        _put(update, type(value).__qualname__, value.name.encode())
    elif isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            _feed_all("objects", array.ravel().tolist(), update)
        else:
            _put(update, f"{array.dtype.str}{array.shape}", array.tobytes())
    elif isinstance(value, Mapping):
        # By the hash of the key: keys need not have an order.
        _feed_all(
            "mapping", sorted((fingerprint(k), fingerprint(v)) for k, v in value.items()), update
        )
    elif isinstance(value, AbstractSet):
        _feed_all("set", sorted(fingerprint(item) for item in value), update)
    elif isinstance(value, tuple | list | range):
        _feed_all(type(value).__name__, value, update)
    elif isinstance(value, type) or callable(value):
        _put(update, "name", _name_of(value).encode())
    elif dataclasses.is_dataclass(value):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        _feed_all(type(value).__qualname__, fields, update)
    else:
        _feed_all(type(value).__qualname__, [value.__getstate__()], update)


def _feed_all(kind: str, items: Iterable[Any], update: Callable[[bytes], None]) -> None:
    _put(update, kind, b"(")
    for item in items:
        _feed(item, update)
    _put(update, kind, b")")


def _put(update: Callable[[bytes], None], kind: str, content: bytes) -> None:
    """Feed what cannot be taken for anything else: with its kind and its length before it."""
    update(f"{len(kind)} {kind} {len(content)} ".encode())
    update(content)


def _name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", "")
    if not name or "<" in name:
        raise TypeError(f"{value!r} has no name that another process knows it by")
    return f"{value.__module__}.{name}"
