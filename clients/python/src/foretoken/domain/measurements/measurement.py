"""What the catalog keeps: runs, the measurements they brought, and files of services."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from foretoken.domain.alias import settle_devices, settle_model
from foretoken.domain.requests.option import describe, flag, option
from foretoken.domain.results.methods import ResultMethods


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """What is known of a stored file.

    `kind` says what it is for ("latency_models"), `name` is unique within the kind. `content_hash`
    is the SHA-256 of the content, given by whoever stores it and checked by the catalog.
    `created_at` is ISO 8601 UTC, `metadata_json` the owner's own. At most one artifact of a kind is
    active.
    """

    kind: str
    name: str
    content_hash: str
    num_bytes: int
    created_at: str
    metadata_json: str = "{}"
    is_active: bool = False


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
    and not stored again. `is_last` completes the run. The catalog may store several batches of an
    import together and acknowledge them then; with `wants_receipt` the sender waits for this one,
    and nothing more comes before its receipt.
    """

    batch_index: int
    rows: ArrowStream
    is_last: bool = False
    wants_receipt: bool = False


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

    Failed and flagged rows are left out unless asked for. With `snapshot` (a content hash, or the
    beginning of one) the choice is among the rows that snapshot holds, with the flags they had.
    """

    operator: str = ""
    device: str = ""
    topology: str = ""
    framework: str = ""
    run_id: str = ""
    include_failed: bool = False
    include_flagged: bool = False
    model: str = ""
    snapshot: str = ""

    def __post_init__(self) -> None:
        """Put own names in place of other names of the device and the model."""
        settle_devices(self, "device")
        settle_model(self, "model")


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
    """What a filter selects at one moment, named by a hash over its rows' content.

    A stored snapshot is immutable: its rows stay readable, with the flags they had, whatever is
    recorded or judged later. `created_at` is ISO 8601 UTC, empty for one that was only described.
    `holders` are those who need it ("model 1f3a..."); a held snapshot cannot be deleted.
    """

    content_hash: str
    num_rows: int
    selection: MeasurementFilter = MeasurementFilter()
    created_at: str = ""
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotChange:
    """Rows of one operator and device that one snapshot has and another has not."""

    operator: str
    device: str
    topology: str
    num_added: int
    num_removed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotDiff:
    """What turns one snapshot into another; a row whose flags changed is removed and added."""

    before: Snapshot
    after: Snapshot
    changes: tuple[SnapshotChange, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSubject:
    """A device, or a model whose layers were measured, and how much is known of it."""

    name: str
    num_rows: int
    num_flagged: int
    num_failed: int
    num_operators: int
    num_runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SqlQuery:
    """A read-only question in SQL. Rows after `max_num_rows` are not sent; 0 means all.

    `timeout_s` is how long it may run; 0 means as long as the catalog allows.
    """

    text: str
    max_num_rows: int = 0
    timeout_s: float = 0.0


# The kind of the jobs in which a catalog judges an import as a whole.
REVIEW_JOB = "review"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRequest:
    """Which rows to judge again; an empty field means any.

    With `is_dry_run` nothing is written: the report says what would be.
    """

    operator: str = option("", "Only this operator.")
    device: str = option("", "Only this device's measurements.")
    run_id: str = option("", "Only what this run brought.", names=("--run",))
    is_dry_run: bool = flag("Report only; change no flags.")

    def __post_init__(self) -> None:
        """Put the device's own name in place of another of its names."""
        settle_devices(self, "device")


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityFinding:
    """Rows that one test flags among those measured alike.

    `num_rows` were judged, `num_flagged` of them flagged, `num_new` of these not before.
    `example` is the explanation of one of them. `source_file` is the file most of them are from.
    """

    test: str
    operator: str
    device: str
    topology: str
    phase: str
    framework: str
    kernel: str
    num_rows: int
    num_flagged: int
    num_new: int
    example: str
    source_file: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class QualityReport(ResultMethods):
    """What a check of the catalog found. `num_withdrawn` rows are no longer flagged."""

    num_rows: int = 0
    num_failed: int = 0
    num_flagged: int = 0
    num_new: int = 0
    num_withdrawn: int = 0
    wall_s: float = 0.0
    findings: tuple[QualityFinding, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneRequest:
    """Delete runs recorded more than `older_than_days` ago that no snapshot needs."""

    older_than_days: float = field(
        metadata=describe(
            "Only runs recorded longer ago, in days.", minimum=0, names=("--older-than",)
        )
    )
    device: str = option("", "Only runs that measured nothing but this device.")
    tool: str = option("", "Only runs of this program: `vidur`.")
    is_dry_run: bool = flag("Say what would go; delete nothing.")

    def __post_init__(self) -> None:
        """Put the device's own name in place of another of its names."""
        settle_devices(self, "device")


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneReport:
    """Runs that were deleted, or would be, and those that were old enough but are needed."""

    deleted_run_ids: tuple[str, ...] = ()
    num_deleted_rows: int = 0
    kept_run_ids: tuple[str, ...] = ()
    num_kept_rows: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactReport:
    """Size of the catalog's files before and after they were written anew."""

    bytes_before: int
    bytes_after: int
    wall_s: float
