"""A database file that another process owns, read without asking for its lock.

DuckDB gives a file to one process. Between two checkpoints that process only appends to the log
and writes blocks that the tables of the last checkpoint do not use: what it needs to survive a
crash is also what lets others read. Whoever reads here must keep checkpoints away meanwhile, see
`Store.steady`.
"""

import contextlib
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import duckdb
from fsspec import AbstractFileSystem

from foretoken.catalog.storage.database_file import delete_file, log_of
from foretoken.catalog.storage.literal import quote

_SCHEME = "shared"
_ATTACHES_SINCE = 2


class _SharedFiles(AbstractFileSystem):  # type: ignore[misc]
    """Hands out one database file and its log, for reading, until it is shut."""

    protocol = _SCHEME
    cachable = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._paths = {f"{_SCHEME}://{file}": file for file in (path, log_of(path))}

    def shut(self) -> None:
        """Hand out no more, so that the file is seen as the tables in it alone."""
        self._paths = {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        status = self._find(path).stat()
        return {"name": path, "type": "file", "size": status.st_size, "mtime": status.st_mtime}

    def open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> "_SharedFile":
        if mode != "rb":
            raise PermissionError(f"{path} is another process's, and only read here")
        return _SharedFile(self._find(path))

    def _find(self, path: str) -> Path:
        file = self._paths.get(path)
        if file is None or not file.exists():
            raise FileNotFoundError(path)
        return file


class _SharedFile:
    """A file as DuckDB uses it: threads seek and read concurrently, or read in turn.

    A thread that has sought reads there; one that has not goes on where the last one ended.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self._size = os.fstat(self._descriptor).st_size
        self._position = 0
        self._sought = threading.local()

    def __del__(self) -> None:
        self.close()  # DuckDB does not always do it

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._size}
        self._position = self._sought.position = position = starts[whence] + offset
        return position

    def tell(self) -> int:
        """Return where this thread would read."""
        sought: int | None = getattr(self._sought, "position", None)
        return self._position if sought is None else sought

    def read(self, size: int) -> bytes:
        start = self.tell()
        content = os.pread(self._descriptor, size, start)
        self._position, self._sought.position = start + len(content), None
        return content

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def attach_shared(
    connection: duckdb.DuckDBPyConnection, path: Path, name: str, folder: Path
) -> None:
    """Attach a file that another process has open, and its log, as a database of that name.

    DuckDB 1.5 attaches no file of a file system made in Python: it gets a copy in `folder`, which
    nobody else finds there.
    """
    if int(duckdb.__version__.split(".")[0]) >= _ATTACHES_SINCE:
        files = _SharedFiles(path)
        connection.register_filesystem(files)
        connection.execute(f"ATTACH {quote(f'{_SCHEME}://{path}')} AS {name} (READ_ONLY)")
        files.shut()
    else:
        copy = folder / path.name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # The log last: it may tell of blocks of the file, never the other way round.
            shutil.copyfile(path, copy)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(log_of(path), log_of(copy))
            connection.execute(f"ATTACH {quote(str(copy))} AS {name} (READ_ONLY)")
        finally:
            delete_file(copy)
