"""The finished items of a job in a file, so that after a crash none is done again."""

import dataclasses
import enum
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import foretoken.domain
import foretoken.simulator
from foretoken.jobs.executor import Executor, R, S, T, keep_going
from foretoken.jobs.record_file import RecordFile

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


class Journal(RecordFile):
    """The results of a search by key, pickled: the file is for the service that wrote it.

    `num_read` counts the results that were asked for.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "the results of the search")
        self.num_read = 0

    def read(self, key: bytes) -> Any:
        """Return the result of a key that is kept."""
        self.num_read += 1
        return pickle.loads(self[key])  # noqa: S301 - our own file

    def keep(self, key: bytes, result: Any) -> None:
        """Keep the result of a key; one that is kept already stays.

        Raises:
            StorageFullError: it cannot be written.

        """
        if key not in self:
            self.append(key, pickle.dumps(result, pickle.HIGHEST_PROTOCOL))


def run_journaled(
    executor: Executor,
    journal: Journal,
    function: Callable[[T, S], R],
    items: Sequence[T],
    shared: S,
    check: Callable[[], None] = keep_going,
) -> Iterator[tuple[int, R]]:
    """Yield the index and result of every item, as `Executor.run`, but do none that is kept.

    First come those that are, in order; what is done is kept before it is given. A result is
    another's where the function, the item, `shared` or the code differs. Equal
    items are done once.

    Raises:
        StorageFullError: a result cannot be written.
        as `Executor.run`.

    """
    common = fingerprint(code_version(), function, shared)
    keys = [fingerprint(common, item) for item in items]
    places: dict[bytes, list[int]] = {}
    for index, key in enumerate(keys):
        if key in journal:
            yield index, journal.read(key)
        else:
            places.setdefault(key, []).append(index)
    first = [indexes[0] for indexes in places.values()]
    for number, result in executor.run(function, [items[i] for i in first], shared, check):
        key = keys[first[number]]
        journal.keep(key, result)
        for index in places[key]:
            yield index, result
