"""Every error a caller of Foretoken can meet, each with a stable reason.

The reason travels over the wire and selects the class again on the other side, so it never changes
once released.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

T = TypeVar("T")


def find_near(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that a wrong one is likely to mean, the nearest first."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request or configuration that cannot be used."""

    field: str
    description: str


# What must hold of a field, and what to say where it does not.
Checks = Mapping[str, tuple[bool, str]]


def find_violations(checks: Checks, prefix: str = "") -> list[FieldViolation]:
    """Return the fields, named after a prefix, of which something does not hold."""
    return [
        FieldViolation(prefix + field, problem)
        for field, (is_legal, problem) in checks.items()
        if not is_legal
    ]


def at_least(record: object, least: float, *fields: str) -> Checks:
    """Return that fields of a record are no less than a number, nor no number at all."""
    problem = f"must be at least {least:g}" if least else "must not be negative"
    return {field: (getattr(record, field) >= least, problem) for field in fields}


def positive(record: object, *fields: str) -> Checks:
    """Return that fields of a record are above 0."""
    return {field: (getattr(record, field) > 0, "must be positive") for field in fields}


def one_of(record: object, **allowed: Collection[str]) -> Checks:
    """Return that fields of a record are each one of some words."""
    return {
        field: (getattr(record, field) in words, f"must be one of {', '.join(words)}")
        for field, words in allowed.items()
    }


class ForetokenError(Exception):
    """Base of all errors; `details` are short strings that survive the wire.

    `trace_id` is the request's in the log of the service that it comes from; empty: it is of here.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **details: str) -> None:
        """Keep the message for people and the details for programs."""
        super().__init__(message)
        self.message = message
        self.details = details
        self.trace_id = ""


class InvalidRequestError(ForetokenError):
    """The request can never work as it stands; `violations` name the fields."""

    reason = "INVALID_REQUEST"

    def __init__(
        self, message: str, violations: Iterable[FieldViolation] = (), **details: str
    ) -> None:
        """Keep the message and the field violations."""
        super().__init__(message, **details)
        self.violations = tuple(violations)

    @classmethod
    def of_violations(cls, violations: Iterable[FieldViolation], subject: str = "") -> Self:
        """Build the error for several fields, after what they belong to."""
        found = tuple(violations)
        lines = "; ".join(f"{v.field or '(top)'}: {v.description}" for v in found)
        return cls(f"{subject}: {lines}" if subject else lines, found)

    @classmethod
    def of_field(cls, field: str, description: str) -> Self:
        """Build the error for a single field."""
        return cls.of_violations((FieldViolation(field, description),))

    @classmethod
    def check(cls, subject: str, checks: Checks) -> None:
        """Refuse a subject of which something does not hold.

        Raises:
            InvalidRequestError: it names the subject and all such fields.

        """
        if violations := find_violations(checks):
            raise cls.of_violations(violations, subject)


class _UnknownNameError(ForetokenError):
    """A name that no file, dataset or plug-in provides."""

    kind: ClassVar[str] = "name"

    @classmethod
    def named(cls, name: str, known: Iterable[str], field: str = "", kind: str = "") -> Self:
        """Build the error and suggest the nearest known names.

        `field` is where the name stands, `kind` what it should be one of, where the class does not
        say it.
        """
        choices = sorted(known)
        near = find_near(name, choices) or choices[:8]
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        place = f"{field}: " if field else ""
        message = f"{place}unknown {kind or cls.kind} {name!r}{hint}"
        return cls(message, name=name, near=",".join(near))

    @classmethod
    def look_up(cls, name: str, known: Mapping[str, T], field: str = "", kind: str = "") -> T:
        """Return what is known by a name; `field` and `kind` as in `named`.

        Raises:
            this error: nothing is.

        """
        if name not in known:
            raise cls.named(name, known, field, kind)
        return known[name]


class UnknownOperatorError(_UnknownNameError):
    """No operator file of that name."""

    reason = "UNKNOWN_OPERATOR"
    kind = "operator"


class UnknownDeviceError(_UnknownNameError):
    """No device file of that name."""

    reason = "UNKNOWN_DEVICE"
    kind = "device"


class UnknownTopologyError(_UnknownNameError):
    """No topology file of that name."""

    reason = "UNKNOWN_TOPOLOGY"
    kind = "topology"


class UnknownModelError(_UnknownNameError):
    """No model preset of that name."""

    reason = "UNKNOWN_MODEL"
    kind = "model"


class UnknownPluginError(_UnknownNameError):
    """No scheduler, arrival process, importer or other plug-in of that name."""

    reason = "UNKNOWN_PLUGIN"
    kind = "plug-in"


class UnknownDatasetError(_UnknownNameError):
    """No dataset or snapshot of that name."""

    reason = "UNKNOWN_DATASET"
    kind = "dataset"


class UnknownJobError(_UnknownNameError):
    """No job of that id in this service."""

    reason = "UNKNOWN_JOB"
    kind = "job"


class UnknownModelVersionError(_UnknownNameError):
    """No such version of the latency models is kept."""

    reason = "UNKNOWN_MODEL_VERSION"
    kind = "model version"


class UnknownCorrectionError(_UnknownNameError):
    """No correction of that name was learned."""

    reason = "UNKNOWN_CORRECTION"
    kind = "correction"


class UnknownMeasurementError(_UnknownNameError):
    """Nothing was measured under a framework, by a kernel or in a variant of that name."""

    reason = "UNKNOWN_MEASUREMENT"
    kind = "measurement"


class UnknownArtifactError(_UnknownNameError):
    """The catalog keeps no artifact of that kind and name."""

    reason = "UNKNOWN_ARTIFACT"
    kind = "artifact"


class DatasetExistsError(ForetokenError):
    """A dataset of that name is already there with other content."""

    reason = "DATASET_EXISTS"


class NotTrainedError(ForetokenError):
    """The predictor has no model to answer with."""

    reason = "NOT_TRAINED"


class JobNotFinishedError(ForetokenError):
    """The job's result was asked for before it had one."""

    reason = "JOB_NOT_FINISHED"


class DeviceNotPresentError(ForetokenError):
    """The profiler was asked for a device this machine does not have."""

    reason = "DEVICE_NOT_PRESENT"


class ImplausibleTimingError(ForetokenError):
    """The profiler's self-test ran faster than the device can; its numbers cannot be trusted."""

    reason = "IMPLAUSIBLE_TIMING"


class OutOfCoverageError(ForetokenError):
    """The caller refused extrapolation and no measurement covers the question."""

    reason = "OUT_OF_COVERAGE"


class DeviceMemoryError(ForetokenError):
    """The device has too little memory for the operator that was to run."""

    reason = "DEVICE_MEMORY"


class QueueFullError(ForetokenError):
    """Too many jobs wait already; try again later."""

    reason = "QUEUE_FULL"


class ServerBusyError(QueueFullError):
    """A server refused a call before it began, so that making it again is safe."""

    reason = "SERVER_BUSY"

    def __init__(self, message: str, retry_after_s: float = 1.0, **details: str) -> None:
        """Keep how long to wait before the next try."""
        super().__init__(message, **details)
        self.retry_after_s = retry_after_s


class QuotaError(ForetokenError):
    """The caller has used up what it may use of something, or has as many jobs as it may have."""

    reason = "QUOTA"


class SearchTooLargeError(ForetokenError):
    """The space has more points than the service takes; narrow it."""

    reason = "SEARCH_TOO_LARGE"


class CatalogBusyError(ForetokenError):
    """Another process holds the catalog file, or the service cannot be reached; retry."""

    reason = "CATALOG_BUSY"


class ServiceUnavailableError(ForetokenError):
    """A service did not answer within its deadline; retry. `peer` says which other one."""

    reason = "SERVICE_UNAVAILABLE"


class StorageFullError(ForetokenError):
    """The disk the catalog lies on is full; make room and send again what has no receipt."""

    reason = "STORAGE_FULL"


class StreamIdleError(ServiceUnavailableError):
    """Nothing came over a stream for so long that the server ended it; open another."""

    reason = "STREAM_IDLE"


class QueryLimitError(ForetokenError):
    """A query took more time, memory or rows than it may; narrow it."""

    reason = "QUERY_LIMIT"


class SnapshotInUseError(ForetokenError):
    """The snapshot is held by something that needs its rows, such as a trained model."""

    reason = "SNAPSHOT_IN_USE"


class ArtifactInUseError(ForetokenError):
    """The artifact is the active one of its kind: another must be activated first."""

    reason = "ARTIFACT_IN_USE"


class RunConflictError(ForetokenError):
    """A run of that id was recorded with other content."""

    reason = "RUN_CONFLICT"


class CorruptCatalogError(ForetokenError):
    """The catalog file cannot be read as a catalog."""

    reason = "CORRUPT_CATALOG"


class IncompleteCatalogError(CorruptCatalogError):
    """The catalog lacks what it had acknowledged; it says how much, and how to go on without."""

    reason = "INCOMPLETE_CATALOG"


class CancelledJobError(ForetokenError):
    """The job was cancelled before it had a result."""

    reason = "JOB_CANCELLED"


class InterruptedJobError(ForetokenError):
    """The job's service stopped while it ran; create it again."""

    reason = "INTERRUPTED"


class JobLeaseError(ForetokenError):
    """The job is another worker's, or has ended: what this one made of it is of no use."""

    reason = "JOB_LEASE"


class UnauthenticatedError(ForetokenError):
    """The caller did not say who it is."""

    reason = "UNAUTHENTICATED"


class NotAllowedError(ForetokenError):
    """The caller may not do that."""

    reason = "NOT_ALLOWED"
