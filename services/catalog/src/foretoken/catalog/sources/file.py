"""Read files that strangers made: bounded in size, from inside the import folder, never blocking.

A file may be hostile or merely broken. What cannot be used is an `InvalidRequestError` that names
the file, found before memory is spent on it. How much one import may read and unpack in all is a
budget, which `limit_reading` sets.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from foretoken.domain.errors import InvalidRequestError

# Files are held in memory; profiles of whole fleets have some 100 MB.
DEFAULT_MAX_BYTES = 2 << 30

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was read: its path relative to the import, and the SHA-256 of its bytes."""

    name: str
    content_hash: str
    content: bytes


class ReadingBudget:
    """How many bytes may still be read or unpacked."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_left = max_bytes

    def spend(self, num_bytes: int, path: Path) -> None:
        """Take bytes for a file.

        Raises:
            InvalidRequestError: fewer are left.

        """
        if num_bytes > self._num_left:
            refuse(
                path,
                f"holds {num_bytes} bytes, {self._num_left} are left of the {self._max_bytes} that"
                " one import may read; allow more with --option max_bytes=N",
            )
        self._num_left -= num_bytes


_budget: ContextVar[ReadingBudget | None] = ContextVar("reading_budget", default=None)


@contextmanager
def limit_reading(max_bytes: int) -> Iterator[None]:
    """Refuse files once those read inside the block hold more than `max_bytes` in total."""
    token = _budget.set(ReadingBudget(max_bytes))
    try:
        yield
    finally:
        _budget.reset(token)


def current_budget() -> ReadingBudget:
    """Return the budget of the import that is going on, else a fresh one."""
    return _budget.get() or ReadingBudget(DEFAULT_MAX_BYTES)


def refuse(path: Path, description: str) -> NoReturn:
    """Raise the error for a file that cannot be used."""
    raise InvalidRequestError.of_field("path", f"{path}: {description}")


def read_source_file(path: Path, root: Path) -> SourceFile:
    """Read a file that lies under `root`.

    Raises:
        InvalidRequestError: it cannot be read, leads out of `root`, is no regular file, is larger
            than the import may read, changes meanwhile, or is a Git LFS pointer instead of the
            data.

    """
    source = open_source_file(path, root)
    if is_lfs_pointer(source):
        raise InvalidRequestError.of_field(
            "path",
            f"{path} is a Git LFS pointer, not the data; run `git lfs pull` where it is from",
        )
    return source


def open_source_file(path: Path, root: Path) -> SourceFile:
    """Read a file as `read_source_file` does, but a Git LFS pointer as well."""
    name = path.relative_to(root).as_posix() if path != root else path.name
    if not name.isprintable():
        refuse(path, "the file's name cannot be printed")
    content = _read_bytes(path, root)
    return SourceFile(name, hashlib.sha256(content).hexdigest(), content)


def is_lfs_pointer(source: SourceFile) -> bool:
    """Return whether a file only says where Git LFS keeps the data."""
    return source.content.startswith(_LFS_POINTER)


def _read_bytes(path: Path, root: Path) -> bytes:
    try:
        target = _resolve(path, root)
        # Looked at before it is opened: opening a device can act, a pipe would wait for a writer.
        _check_kind(path, target.stat())
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(target, flags), "rb") as file:
            before = os.fstat(file.fileno())
            _check_kind(path, before)
            current_budget().spend(before.st_size, path)
            content = file.read(before.st_size + 1)
            after = os.fstat(file.fileno())
    except (OSError, RuntimeError) as err:  # a loop of links is a RuntimeError
        refuse(path, getattr(err, "strerror", None) or str(err))
    is_same = (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    if not is_same or len(content) != before.st_size:
        refuse(path, "changed while it was read; import it once it is complete")
    return content


def _resolve(path: Path, root: Path) -> Path:
    """Return where a path leads: anywhere if it is what the user named, else under the root."""
    target = path.resolve(strict=True)
    if path != root and not target.is_relative_to(root.resolve()):
        refuse(path, f"leads out of {root}, to {target}; copy it there, or import that folder")
    return target


def _check_kind(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        refuse(path, "not a regular file")
