"""A database's file and its write-ahead log: attached, measured, deleted, brought to the disk."""

import errno
import os
from pathlib import Path

import duckdb

from foretoken.catalog.storage.literal import quote
from foretoken.domain.errors import CatalogBusyError, ForetokenError, StorageFullError

# Files that DuckDB 1.5 can read too. Row groups of half the usual size: a group commit fills one,
# and what fills one goes to its place at once, compressed by several threads, rather than through
# the log (measured: twice the rows/s).
_OPTIONS = "STORAGE_VERSION 'v1.5.0', ROW_GROUP_SIZE 61440"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def attach_file(connection: duckdb.DuckDBPyConnection, path: Path, name: str) -> None:
    """Attach a file in the catalog's format as a database of that name, made when absent."""
    connection.execute(f"ATTACH {quote(str(path))} AS {name} ({_OPTIONS})")


def log_of(path: Path) -> Path:
    """Return where DuckDB keeps the log of a database file."""
    return path.with_name(path.name + ".wal")


def note_of(path: Path) -> Path:
    """Return where the newest acknowledged commit of a database file is noted."""
    return path.with_name(path.name + ".acknowledged")


def rollback_of(path: Path) -> Path:
    """Return where blocks of a database file are kept while its log is merged."""
    return path.with_name(path.name + ".rollback")


def companions_of(path: Path) -> tuple[Path, ...]:
    """Return the files that may lie next to a database file and belong to it, the note last.

    DuckDB has a second log while it merges the first one into the file.
    """
    log = log_of(path)
    second_logs = (log.with_name(log.name + end) for end in (".checkpoint", ".recovery"))
    return (log, *second_logs, rollback_of(path), note_of(path))


def log_bytes(path: Path) -> int:
    """Return the size of the log of a database file, in bytes; 0 where there is none."""
    return _size(log_of(path))


def size_bytes(path: Path) -> int:
    """Return the size of a database file and its log, in bytes."""
    return _size(path) + log_bytes(path)


def delete_file(path: Path) -> None:
    """Delete a database file and what belongs to it, where they are."""
    for file in (path, *companions_of(path)):
        file.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def refused_by_disk(path: Path, error: OSError) -> ForetokenError:
    """Return the error that says that a file next to the database cannot be written."""
    kind = StorageFullError if error.errno in _FULL else CatalogBusyError
    return kind(
        f"{path} cannot be written ({error.strerror}); look at the disk and send again what has no "
        "receipt"
    )


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
