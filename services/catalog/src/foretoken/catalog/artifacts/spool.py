"""A file's content on the disk, out of everybody's sight, while it is checked or handed on.

Neither does a slow sender keep others from writing the catalog, nor a slow reader from compacting
it. What is open here has no name: nothing of it outlives its process.
"""

import contextlib
import errno
import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from io import BufferedRandom
from pathlib import Path

from foretoken.domain.errors import InvalidRequestError, StorageFullError

# What a disk without room says: full, over quota, over the size a file may have.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Spool:
    """Bytes in a file without a name; `num_bytes` are in it."""

    def __init__(self, file: BufferedRandom) -> None:
        """Keep an open file that is empty."""
        self._file = file
        self.num_bytes = 0

    def append(self, piece: bytes) -> None:
        """Write what follows.

        Raises:
            StorageFullError: the disk is full.

        """
        self.put(self.num_bytes, piece)

    def put(self, first_byte: int, piece: bytes) -> None:
        """Write what belongs to a place.

        Raises:
            StorageFullError: the disk is full.

        """
        with _explained():
            self._file.seek(first_byte)
            self._file.write(piece)
        self.num_bytes += len(piece)

    def pieces(self, piece_bytes: int) -> Iterator[bytes]:
        """Yield all of it from the start, in pieces of this size."""
        with _explained():
            self._file.seek(0)
        while piece := self._file.read(piece_bytes):
            yield piece

    def content_hash(self) -> str:
        """Return the SHA-256 of all of it."""
        with _explained():
            self._file.seek(0)
            return hashlib.file_digest(self._file, "sha256").hexdigest()


@contextlib.contextmanager
def open_spool(folder: Path) -> Iterator[Spool]:
    """Hand out an empty spool in a folder, made when absent; gone at the end.

    Raises:
        InvalidRequestError: the folder cannot be used.
        StorageFullError: the disk is full.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed below
    except OSError as err:
        raise InvalidRequestError.of_field("path", f"{folder}: {err.strerror}") from err
    try:
        yield Spool(file)
    finally:
        with contextlib.suppress(OSError):  # what could not be written is not wanted any more
            file.close()


def collect(spool: Spool, content: Iterable[bytes], num_bytes: int, content_hash: str) -> None:
    """Write content into an empty spool and check that it is what it is said to be.

    Raises:
        InvalidRequestError: its size or its SHA-256 is another.
        StorageFullError: the disk is full.

    """
    for piece in content:
        if spool.num_bytes + len(piece) > num_bytes:
            raise InvalidRequestError.of_field(
                "num_bytes", f"is {num_bytes}, but there is more content; send it again"
            )
        spool.append(piece)
    if spool.num_bytes != num_bytes:
        raise InvalidRequestError.of_field(
            "num_bytes", f"is {num_bytes}, but the content ends at {spool.num_bytes}; send it again"
        )
    found = spool.content_hash()
    if found != content_hash:
        raise InvalidRequestError.of_field(
            "content_hash", f"is {content_hash}, but the content's is {found}; send it again"
        )


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as err:
        if err.errno not in _FULL:
            raise
        raise StorageFullError(
            "the catalog's disk has no room for the file; make room and send it again"
        ) from err
