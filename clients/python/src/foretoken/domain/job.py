"""Work that outlives its caller: state, progress, cancellation, and items watched as they come."""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from foretoken.domain.errors import CancelledJobError, ForetokenError, JobNotFinishedError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Watch(Protocol[T_co]):
    """Items as they come; `close` ends it.

    That of a service may be closed by another thread, also while one waits for the next item.
    """

    def __iter__(self) -> Iterator[T_co]:
        """Return the watch itself."""

    def __next__(self) -> T_co:
        """Return the next item, when there is one."""

    def close(self) -> None:
        """Want no more: who waits for the next item finds the end."""


class WakingWatch(Generic[T]):
    """A watch over `items`, whose waiting ends where `wake` is called."""

    def __init__(self, items: Iterator[T], wake: Callable[[], None]) -> None:
        """Keep both."""
        self._items = items
        self._wake = wake

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> T:
        """Return the next item, when there is one."""
        return next(self._items)

    def close(self) -> None:
        """Want no more, from any thread."""
        self._wake()


class JobState(enum.Enum):
    """Life of a job."""

    QUEUED = 1
    RUNNING = 2
    SUCCEEDED = 3
    FAILED = 4
    CANCELLED = 5

    @property
    def is_final(self) -> bool:
        """Whether the job will not change any more."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job as its service reports it.

    `progress_ratio` runs from 0 to 1. Times are ISO 8601 UTC, empty where not yet reached.
    A failed job carries the reason and message of its error. `notices` are lines to show to people,
    once each, oldest first: `message` is what it does now, and may be shown or not. `owner` is the
    name of the caller who created it, empty where nobody had to have one. `title` says in a few
    words what it is about, empty where its kind says all.
    """

    job_id: str
    kind: str
    state: JobState
    progress_ratio: float = 0.0
    message: str = ""
    created_at: str = ""
    finished_at: str = ""
    error_reason: str = ""
    error_message: str = ""
    notices: tuple[str, ...] = ()
    owner: str = ""
    title: str = ""


def error_of_job(job: Job) -> ForetokenError:
    """Return the error a failed job ended with."""
    error = ForetokenError(job.error_message, job_id=job.job_id, job_reason=job.error_reason)
    for cls in _subclasses(ForetokenError):
        # One that only groups others has no reason of its own, but that of what nobody foresaw.
        if "reason" in vars(cls) and cls.reason == job.error_reason:
            return cls(job.error_message, job_id=job.job_id)
    return error


def check_succeeded(job: Job) -> None:
    """Raise what a job without a result has instead.

    Raises:
        JobNotFinishedError: it has none yet.
        CancelledJobError: it was cancelled.
        ForetokenError: it failed; the job's own error.

    """
    if job.state is JobState.CANCELLED:
        raise CancelledJobError(f"job {job.job_id} was cancelled")
    if job.state is JobState.FAILED:
        raise error_of_job(job)
    if job.state is not JobState.SUCCEEDED:
        raise JobNotFinishedError(f"job {job.job_id} is {job.state.name.lower()}")


def _subclasses(cls: type[ForetokenError]) -> Iterator[type[ForetokenError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
