"""The finished items of a job in a file, so that after a crash none is done again."""

import dataclasses
import enum
import hashlib
import os
import pickle
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

import foretoken.domain
import foretoken.simulator
from foretoken.domain.errors import StorageFullError
from foretoken.jobs.executor import Executor, R, S, T, keep_going

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


# Before each result: its item's key, its length in bytes and its checksum.
_HEADER = struct.Struct("<32sQI")
# What the operating system was given survives the death of the process. That it is on the disk,
# for the death of the machine, is asked for this often: so much work may be done again.
_SYNC_PERIOD_S = 1.0


class Journal:
    """An append-only file of results by key; a context manager.

    A record that a crash tore off is dropped, with all after it, when the file is opened; the
    `num_found` before it are kept. `num_read` counts the results that were asked for. Results are
    pickled: the file is for the service that wrote it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[bytes, tuple[int, int]] = {}
        self._file: BufferedRandom | None = None
        self._end = 0
        self._synced_s = 0.0
        self.num_found = 0
        self.num_read = 0

    def __enter__(self) -> Self:
        """Open the file and find what is in it.

        Raises:
            StorageFullError: it cannot be made.

        """
        try:
            self._file = self._path.open("r+b" if self._path.exists() else "w+b")
            self._find_records()
            self._opened.truncate(self._end)
            self.num_found = len(self._places)
        except OSError as err:
            raise _full(self._path, err) from err
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._opened.close()
        self._file = None

    def __contains__(self, key: bytes) -> bool:
        """Whether the result of a key is kept."""
        return key in self._places

    def __len__(self) -> int:
        """How many results are kept."""
        return len(self._places)

    def read(self, key: bytes) -> Any:
        """Return the result of a key that is kept."""
        start, length = self._places[key]
        self.num_read += 1
        self._opened.seek(start)
        return pickle.loads(self._opened.read(length))  # noqa: S301 - our own file

    def append(self, key: bytes, result: Any) -> None:
        """Keep the result of a key; one that is kept already stays.

        Raises:
            StorageFullError: it cannot be written.

        """
        if key in self._places:
            return
        content = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        header = _HEADER.pack(key, len(content), zlib.crc32(content))
        try:
            self._opened.seek(self._end)
            self._opened.write(header + content)
            self._opened.flush()
            self._sync()
        except OSError as err:
            raise _full(self._path, err) from err
        self._places[key] = (self._end + _HEADER.size, len(content))
        self._end += _HEADER.size + len(content)

    @property
    def _opened(self) -> BufferedRandom:
        if self._file is None:
            raise RuntimeError("the journal is not open")
        return self._file

    def _sync(self) -> None:
        if time.monotonic() - self._synced_s >= _SYNC_PERIOD_S:
            os.fsync(self._opened.fileno())
            self._synced_s = time.monotonic()

    def _find_records(self) -> None:
        while len(header := self._opened.read(_HEADER.size)) == _HEADER.size:
            key, length, checksum = _HEADER.unpack(header)
            content = self._opened.read(length)
            if len(content) < length or zlib.crc32(content) != checksum:
                return
            self._places[key] = (self._end + _HEADER.size, length)
            self._end += _HEADER.size + length


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
        journal.append(key, result)
        for index in places[key]:
            yield index, result


def _full(path: Path, err: OSError) -> StorageFullError:
    return StorageFullError(
        f"the results of the search cannot be kept in {path.parent}: {err.strerror}; make room and"
        " start it again"
    )
