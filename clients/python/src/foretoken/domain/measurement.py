"""What the catalog keeps: runs, and the measurements they brought."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class ArrowStream(Protocol):
    """Anything that hands out Arrow data through the PyCapsule interface (pyarrow, DuckDB, ...)."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return an ArrowArrayStream capsule."""


class RunKind(enum.Enum):
    """Where the measurements of a run come from."""

    PROFILE = 1
    IMPORT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One profiling session or one import.

    Rows of an IMPORT run are visible once the run is complete; rows of a PROFILE run at once.
    `content_hash` identifies the input: recording a complete run again is a no-op, and the same
    id with another hash is a `RunConflictError`. `environment` says what software and machine.
    """

    run_id: str
    kind: RunKind
    tool: str
    content_hash: str = ""
    source: str = ""
    licence: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementBatch:
    """Rows of one run in the Arrow measurement schema (`wire/arrow.py`).

    `batch_index` starts at 0 and makes a retry harmless: a batch already stored is acknowledged
    and not stored again. `is_last` completes the run.
    """

    batch_index: int
    rows: ArrowStream
    is_last: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReceipt:
    """The catalog has this batch on disk. `was_duplicate`: it was there before."""

    run_id: str
    batch_index: int
    num_rows: int
    num_flagged: int = 0
    was_duplicate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementFilter:
    """Choose measurements; an empty field means any.

    Failed and flagged rows are left out unless asked for.
    """

    operator: str = ""
    device: str = ""
    topology: str = ""
    framework: str = ""
    run_id: str = ""
    include_failed: bool = False
    include_flagged: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A run as the catalog lists it. `completed_at` is ISO 8601 UTC, empty while open."""

    run: Run
    started_at: str
    completed_at: str = ""
    num_rows: int = 0
    num_flagged: int = 0
    num_failed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How much the catalog knows about one operator on one device."""

    operator: str
    device: str
    topology: str
    dtype: str
    phase: str
    num_rows: int
    num_flagged: int
    num_failed: int
    frameworks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The identity of what a filter selects now: a hash over its rows' content."""

    content_hash: str
    num_rows: int
