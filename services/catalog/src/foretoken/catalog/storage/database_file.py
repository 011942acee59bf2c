"""A database's file and its log: attached, measured, deleted, merged, rolled back.

DuckDB merges a log by writing new blocks, then a header that refers to them. Blocks of metadata
with room left are the exception: it adds to them where they are. A process that dies in such a
write leaves a block that is half old, half new, with a wrong checksum, which the database needs
still. As the part in use is the same before and after, the blocks of before make it whole again as
long as the header is the one of before; with a new header, all had been written.
"""

import contextlib
import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


# DuckDB's file: a header of the format, two of the content, written in turn, then the blocks. One
# of the content begins with a checksum, the number of the merge, three numbers, the block size.
_HEADER_PLACES = (4096, 8192)
_BLOCKS_PLACE = 12288
_HEADER = struct.Struct("<8xQ24xQ")
# The journal: a checksum of the rest, the number of the last merge, the block size; then, for each
# block, its number and its content.
_CHECKSUM = struct.Struct("<I")
_START = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    """What a database file says of itself: the number of its last merge, bytes of a block."""

    merge: int
    block_bytes: int

    def place_of(self, block: int) -> int:
        return _BLOCKS_PLACE + block * self.block_bytes


class RollbackJournal:
    """Keeps what a merge of one database may rewrite, and puts it back after one cut short."""

    def __init__(self, database: Path) -> None:
        """Keep where they are."""
        self._database = database
        self._path = rollback_of(database)

    @contextlib.contextmanager
    def keep(self, descriptor: int, blocks: Sequence[int]) -> Iterator[None]:
        """Keep blocks of the database, open as `descriptor`, while it is merged.

        The journal stays if the merge fails: the database may need it when it is opened next.

        Raises:
            StorageFullError, CatalogBusyError: the disk does not take the journal.

        """
        with self._open(os.O_CREAT) as journal:
            content = _read_content(descriptor)
            kept = _read_blocks(journal)
            # After a merge that failed, those of before it are the ones that are whole for sure.
            if kept is None or kept[0] != content.merge:
                try:
                    _write_blocks(journal, descriptor, content, blocks)
                    sync(self._path.parent)
                except OSError as err:
                    raise refused_by_disk(self._path, err) from err
            yield
            self._path.unlink()

    def roll_back(self) -> None:
        """Put back what a merge that was cut short had begun to rewrite.

        Raises:
            CatalogBusyError: the merge is at work.

        """
        if not self._path.exists():
            return
        with self._open() as journal:
            kept = _read_blocks(journal)
            # A journal not written whole is of a merge that had not begun.
            if kept is not None and self._database.exists():
                _put_back(self._database, *kept)
            self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _open(self, flag: int = 0) -> Iterator[int]:
        """Open the journal, which one process, and one opening in it, does at a time."""
        journal = os.open(self._path, os.O_RDWR | flag, 0o644)
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield journal
        except BlockingIOError as err:
            raise CatalogBusyError(
                f"the catalog {self._database} is open elsewhere, and its log is being merged"
            ) from err
        finally:
            os.close(journal)


def _read_content(descriptor: int) -> _Content:
    headers = (_HEADER.unpack(os.pread(descriptor, _HEADER.size, at)) for at in _HEADER_PLACES)
    merge, block_bytes = max(headers)
    return _Content(merge=merge, block_bytes=block_bytes)


def _write_blocks(journal: int, descriptor: int, content: _Content, blocks: Sequence[int]) -> None:
    pieces = [_START.pack(content.merge, content.block_bytes)]
    for block in blocks:
        pieces += (
            _NUMBER.pack(block),
            os.pread(descriptor, content.block_bytes, content.place_of(block)),
        )
    kept = b"".join(pieces)
    os.ftruncate(journal, 0)
    with open(journal, "wb", closefd=False) as file:
        file.write(_CHECKSUM.pack(zlib.crc32(kept)) + kept)
    os.fsync(journal)


def _read_blocks(journal: int) -> tuple[int, dict[int, bytes]] | None:
    """Return the number of the last merge before, and blocks by place; None if not all is there."""
    with open(journal, "rb", closefd=False) as file:
        file.seek(0)
        text = file.read()
    kept = text[_CHECKSUM.size :]
    if len(kept) < _START.size or _CHECKSUM.unpack_from(text) != (zlib.crc32(kept),):
        return None
    content = _Content(**dict(zip(("merge", "block_bytes"), _START.unpack_from(kept), strict=True)))
    step = _NUMBER.size + content.block_bytes
    pieces = [kept[at : at + step] for at in range(_START.size, len(kept), step)]
    return content.merge, {
        content.place_of(_NUMBER.unpack_from(piece)[0]): piece[_NUMBER.size :] for piece in pieces
    }


def _put_back(database: Path, merge: int, blocks: dict[int, bytes]) -> None:
    """Write blocks where they were, unless the merge had come to its end."""
    descriptor = os.open(database, os.O_RDWR)
    try:
        if _read_content(descriptor).merge != merge:
            return
        for place, block in blocks.items():
            os.pwrite(descriptor, block, place)
        os.fsync(descriptor)
    except OSError as err:
        raise refused_by_disk(database, err) from err
    finally:
        os.close(descriptor)
