"""What passes between the catalog and a process that answers SQL: its settings, and frames."""

import enum
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO, Self

from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.domain.errors import QueryLimitError


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Where the tables lie, what is asked of them, and what one process may take.

    `memory_bytes` is for DuckDB; the program itself needs some more. `spill_folder` takes what
    does not fit the memory, up to `max_spill_bytes`. `views` gives names and what is in them.
    """

    path: str
    lake: LakeConfig | None
    views: Mapping[str, str]
    num_threads: int
    memory_bytes: int
    spill_folder: str
    max_spill_bytes: int
    max_rows: int
    max_result_bytes: int

    @property
    def catalog(self) -> CatalogConfig:
        """The configuration of a catalog whose tables lie there."""
        return CatalogConfig(
            path=self.path,
            lake=self.lake,
            num_threads=self.num_threads,
            memory_limit=f"{self.memory_bytes} bytes",
        )

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what a line says."""
        fields = json.loads(text)
        lake = fields.pop("lake")
        return cls(lake=LakeConfig(**lake) if lake else None, **fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A text, how many rows are wanted (0: all), and the state of the tables it is asked of."""

    text: str
    num_wanted: int
    revision: str

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what a line says."""
        return cls(**json.loads(text))


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
