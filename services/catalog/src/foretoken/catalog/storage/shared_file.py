"""A database file that another process owns, read without asking for its lock.

DuckDB gives a file to one process. Between two checkpoints that process only appends to the log
and writes blocks that the tables of the last checkpoint do not use: what it needs to survive a
crash is also what lets others read. Whoever reads here must keep checkpoints away meanwhile, see
`Store.steady`.
"""

import os
from pathlib import Path
from typing import Any

import duckdb
from fsspec import AbstractFileSystem

from foretoken.catalog.storage.database_file import log_of
from foretoken.catalog.storage.literal import quote

_SCHEME = "shared"


class _SharedFiles(AbstractFileSystem):  # type: ignore[misc]
    """Hands out one database file and its log, for reading."""

    protocol = _SCHEME
    cachable = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._paths = {f"{_SCHEME}://{file}": file for file in (path, log_of(path))}

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
    """A file as DuckDB uses it, which does not always close it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def __del__(self) -> None:
        self.close()

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()


def attach_shared(connection: duckdb.DuckDBPyConnection, path: Path, name: str) -> None:
    """Attach a file that another process has open, and its log, as a database of that name."""
    connection.register_filesystem(_SharedFiles(path))
    connection.execute(f"ATTACH {quote(f'{_SCHEME}://{path}')} AS {name} (READ_ONLY)")
