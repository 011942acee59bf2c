"""Records by key in a file of a job, so that what is done is not done again after a crash."""

import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Self

from foretoken.domain.errors import StorageFullError

KEY_BYTES = 32
# Before each record: its key, its length in bytes and its checksum.
_HEADER = struct.Struct(f"<{KEY_BYTES}sQI")
# What the operating system was given survives the death of the process. That it is on the disk,
# for the death of the machine, is asked for this often: so much work may be done again.
_SYNC_PERIOD_S = 1.0


class RecordFile(Mapping[bytes, bytes]):
    """An append-only file of records by keys of `KEY_BYTES`; a context manager.

    A record that a crash tore off, or that was changed, is dropped with all after it when the file
    is opened; the `num_found` before it are kept. Records are read when they are asked for.
    """

    def __init__(self, path: Path, what: str) -> None:
        """Keep where they lie, and what errors call them: `the results of the search`."""
        self._path = path
        self._what = what
        self._places: dict[bytes, tuple[int, int]] = {}
        self._file: FileIO | None = None
        self._synced_s = 0.0
        self.num_found = 0

    def __enter__(self) -> Self:
        """Open the file and find what is in it.

        Raises:
            StorageFullError: it cannot be made.

        """
        try:
            # Writes go to the end, also where a process that was given up for dead writes one more.
            self._file = self._path.open("a+b", buffering=0)
            self._file.truncate(self._find_records())
            self.num_found = len(self._places)
        except OSError as err:
            raise self._full(err) from err
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._opened.close()
        self._file = None

    def __getitem__(self, key: bytes) -> bytes:
        """Return the record of a key."""
        start, length = self._places[key]
        return os.pread(self._opened.fileno(), length, start)

    def __contains__(self, key: object) -> bool:
        """Whether the record of a key is kept."""
        return key in self._places

    def __iter__(self) -> Iterator[bytes]:
        """Give the keys, in the order of their records."""
        return iter(self._places)

    def __len__(self) -> int:
        """How many records are kept."""
        return len(self._places)

    def append(self, key: bytes, content: bytes) -> None:
        """Keep the record of a key; one that is kept already stays.

        Raises:
            StorageFullError: it cannot be written; what was written of it is taken back.

        """
        if key in self._places:
            return
        file = self._opened
        start = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(_HEADER.pack(key, len(content), zlib.crc32(content)) + content)
            while rest:
                rest = rest[file.write(rest) :]
            self._sync()
        except OSError as err:
            with suppress(OSError):
                file.truncate(start)
            raise self._full(err) from err
        self._places[key] = (file.tell() - len(content), len(content))

    @property
    def _opened(self) -> FileIO:
        if self._file is None:
            raise RuntimeError("the file of records is not open")
        return self._file

    def _sync(self) -> None:
        if time.monotonic() - self._synced_s >= _SYNC_PERIOD_S:
            os.fsync(self._opened.fileno())
            self._synced_s = time.monotonic()

    def _find_records(self) -> int:
        """Note where the records are, and return where the last whole one ends."""
        self._places.clear()
        end, size = 0, os.fstat(self._opened.fileno()).st_size
        with self._path.open("rb") as file:
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                key, length, checksum = _HEADER.unpack(header)
                start = end + _HEADER.size
                if length > size - start or zlib.crc32(file.read(length)) != checksum:
                    break
                self._places[key] = (start, length)
                end = start + length
        return end

    def _full(self, err: OSError) -> StorageFullError:
        return StorageFullError(
            f"{self._what} cannot be kept in {self._path.parent}: {err.strerror}; make room and"
            " start it again"
        )
