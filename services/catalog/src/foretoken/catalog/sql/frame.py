"""What passes between the catalog and a process that answers questions in SQL."""

import enum
import struct
from typing import IO

from foretoken.domain.errors import QueryLimitError

_HEADER = struct.Struct(">BQ")


class Kind(enum.IntEnum):
    """What a frame of an answer holds.

    `READY` comes once and holds nothing. `COLUMNS` and `ROWS` are Arrow IPC streams without and
    with rows. The others are JSON and end the answer. They say `is_large`, whether the process has
    become too large for another one; `REFUSED`, `LIMIT` and `FAILED` give a `message`, the latter
    two also the `limit` that was exceeded and DuckDB's class of `error`.
    """

    READY = 0
    COLUMNS = 1
    ROWS = 2
    END = 3
    REFUSED = 4
    LIMIT = 5
    FAILED = 6


def write_frame(file: IO[bytes], kind: Kind, content: bytes | memoryview) -> None:
    """Write one frame, and bring it on its way."""
    file.write(_HEADER.pack(kind, len(content)))
    file.write(content)
    file.flush()


def read_frame(file: IO[bytes]) -> tuple[Kind, bytes] | None:
    """Return the next frame; nothing where the process ended before the end of one."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    kind, num_bytes = _HEADER.unpack(header)
    content = file.read(num_bytes)
    return (Kind(kind), content) if len(content) == num_bytes else None


def limit_error(limit: str, reason: str) -> QueryLimitError:
    """Return the error for a limit: `time`, `memory`, `disk`, `rows`, `size` or `crash`."""
    return QueryLimitError(f"the query {reason}; narrow it", limit=limit)
