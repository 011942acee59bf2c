"""Run jobs in threads and keep their states and results in a folder.

A job's state and result are JSON files, written whole by rename, so they outlive the caller and
the process. A job that was running when its process died is found failed, reason INTERRUPTED.
"""

import dataclasses
import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from foretoken.domain import schema
from foretoken.domain.errors import (
    CancelledJobError,
    ForetokenError,
    InterruptedJobError,
    InvalidRequestError,
    JobNotFinishedError,
    QueueFullError,
    StorageFullError,
    UnknownJobError,
)
from foretoken.domain.job import Job, JobState

T = TypeVar("T")

_log = logging.getLogger(__name__)


class JobProgress:
    """Given to the work of a job: tells how far it is, and learns that it was cancelled.

    `job_id` names the job; files it attaches are kept beside its result.
    """

    def __init__(
        self,
        report: Callable[[float, str], None],
        cancelled: threading.Event,
        job_id: str = "",
        folder: Path = Path(),
    ) -> None:
        """Connect to the runner."""
        self._report = report
        self._cancelled = cancelled
        self._folder = folder
        self.job_id = job_id

    def update(self, ratio: float, message: str = "") -> None:
        """Publish progress between 0 and 1.

        Raises:
            CancelledJobError: the job was cancelled; let it pass.

        """
        if self._cancelled.is_set():
            raise CancelledJobError("the job was cancelled")
        self._report(min(max(ratio, 0.0), 1.0), message)

    @contextmanager
    def attach(self, name: str) -> Iterator[Path]:
        """Give the path to write a file to; it is the job's `name` when the block ends well.

        Raises:
            StorageFullError: it cannot be written.

        """
        path = self._folder / f"{self.job_id}.{name}"
        temporary = path.with_suffix(".tmp")
        try:
            yield temporary
            temporary.replace(path)
        except OSError as err:
            raise _full(self._folder, err) from err
        finally:
            temporary.unlink(missing_ok=True)


Work = Callable[[JobProgress], object]


class JobRunner:
    """Queue of jobs over a few threads. The work returns the dataclass that is its result."""

    def __init__(self, folder: Path, *, num_workers: int = 1, max_queued: int = 64) -> None:
        """Keep job files under `folder`; call `open` before use."""
        self._folder = folder
        self._max_queued = max_queued
        self._jobs: dict[str, Job] = {}
        self._cancelled: dict[str, threading.Event] = {}
        self._changed = threading.Condition()
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="job")

    def open(self) -> None:
        """Load the jobs of earlier processes; those that never ended are failed.

        Raises:
            InvalidRequestError: the folder cannot be made.

        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise InvalidRequestError.of_field(
                "state_folder", f"{self._folder}: {err.strerror}"
            ) from err
        for path in sorted(self._folder.glob("*.job.json")):
            job = _load(path)
            if job is None:
                continue
            if not job.state.is_final:
                job = dataclasses.replace(
                    job,
                    state=JobState.FAILED,
                    finished_at=_now(),
                    error_reason=InterruptedJobError.reason,
                    error_message="the service stopped while the job ran; create it again",
                )
            self._jobs[job.job_id] = job
            self._save(job)

    def close(self) -> None:
        """Cancel what runs and wait for it; what still waits never runs."""
        for event in list(self._cancelled.values()):
            event.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        for job in self.list():
            self._finish(job.job_id, JobState.CANCELLED)

    def create(self, kind: str, work: Work) -> Job:
        """Queue work and return at once.

        Raises:
            QueueFullError: too many jobs wait already.

        """
        with self._changed:
            num_waiting = sum(job.state is JobState.QUEUED for job in self._jobs.values())
            if num_waiting >= self._max_queued:
                raise QueueFullError(f"{num_waiting} jobs wait already; try again later")
            job = Job(
                job_id=f"{kind}-{uuid.uuid4().hex[:12]}",
                kind=kind,
                state=JobState.QUEUED,
                created_at=_now(),
            )
            self._cancelled[job.job_id] = threading.Event()
            self._put(job)
        self._executor.submit(self._run, job.job_id, work)
        return job

    def get(self, job_id: str) -> Job:
        """Return the job's present state.

        Raises:
            UnknownJobError: no such job.

        """
        with self._changed:
            return UnknownJobError.look_up(job_id, self._jobs)

    def list(self) -> tuple[Job, ...]:
        """Return all jobs, newest first."""
        with self._changed:
            return tuple(sorted(self._jobs.values(), key=lambda j: j.created_at, reverse=True))

    def watch(self, job_id: str) -> Iterator[Job]:
        """Yield the job now and after every change until it is final."""
        current = self.get(job_id)
        yield current
        while not current.state.is_final:
            current = self._wait_for_change(current)
            yield current

    def cancel(self, job_id: str) -> Job:
        """Ask a job to stop; one that still waits is cancelled at once."""
        job = self.get(job_id)
        if not job.state.is_final:
            self._cancelled[job_id].set()
            if job.state is JobState.QUEUED:
                self._finish(job_id, JobState.CANCELLED)
        return self.get(job_id)

    def result(self, job_id: str, cls: type[T]) -> T:
        """Return the result of a finished job.

        Raises:
            JobNotFinishedError: it has none yet.
            CancelledJobError: it was cancelled.
            ForetokenError: it failed; the job's own error.

        """
        self._check_succeeded(job_id)
        return schema.decode(cls, json.loads(self._path(job_id, "result").read_text("utf-8")))

    def _check_succeeded(self, job_id: str) -> None:
        job = self.get(job_id)
        if job.state is JobState.CANCELLED:
            raise CancelledJobError(f"job {job_id} was cancelled")
        if job.state is JobState.FAILED:
            raise error_of_job(job)
        if job.state is not JobState.SUCCEEDED:
            raise JobNotFinishedError(f"job {job_id} is {job.state.name.lower()}")

    def attachment(self, job_id: str, name: str) -> Path:
        """Return the path of a file that a finished job has attached.

        Raises:
            JobNotFinishedError, CancelledJobError, ForetokenError: as `result`.
            InvalidRequestError: it attached no such file.

        """
        self._check_succeeded(job_id)
        path = self._folder / f"{job_id}.{name}"
        if not path.is_file():
            raise InvalidRequestError.of_field("job_id", f"job {job_id} kept no {name}")
        return path

    def _wait_for_change(self, seen: Job) -> Job:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs[seen.job_id] != seen)
            return self._jobs[seen.job_id]

    def _run(self, job_id: str, work: Work) -> None:
        if self._cancelled[job_id].is_set():
            self._finish(job_id, JobState.CANCELLED)
            return
        self._update(job_id, state=JobState.RUNNING)

        def report(ratio: float, message: str) -> None:
            self._update(job_id, progress_ratio=ratio, message=message)

        try:
            progress = JobProgress(report, self._cancelled[job_id], job_id, self._folder)
            outcome = work(progress)
            self._save_result(job_id, outcome)
        except CancelledJobError:
            self._finish(job_id, JobState.CANCELLED)
        except ForetokenError as err:
            self._finish(job_id, JobState.FAILED, err.reason, err.message)
        except Exception as err:  # noqa: BLE001
            # The boundary of the thread: whatever a job raises must reach whoever watches it.
            _log.exception("job %s failed", job_id)
            self._finish(job_id, JobState.FAILED, "INTERNAL", f"{type(err).__name__}: {err}")
        else:
            self._finish(job_id, JobState.SUCCEEDED)

    def _finish(self, job_id: str, state: JobState, reason: str = "", message: str = "") -> None:
        ratio = 1.0 if state is JobState.SUCCEEDED else self.get(job_id).progress_ratio
        self._update(
            job_id,
            state=state,
            progress_ratio=ratio,
            finished_at=_now(),
            error_reason=reason,
            error_message=message,
        )

    def _update(self, job_id: str, **changes: object) -> None:
        with self._changed:
            job = self._jobs[job_id]
            if not job.state.is_final:
                self._put(dataclasses.replace(job, **changes))  # type: ignore[arg-type]

    def _put(self, job: Job) -> None:
        with self._changed:
            previous = self._jobs.get(job.job_id)
            self._jobs[job.job_id] = job
            if previous is None or previous.state is not job.state:
                self._save(job)
            self._changed.notify_all()

    def _save(self, job: Job) -> None:
        try:
            _write_whole(self._path(job.job_id, "job"), json.dumps(schema.encode(job)))
        except OSError as err:
            # Whoever watches it learns how it ended, though the next process will not.
            _log.warning("the state of a job could not be saved job_id=%s: %s", job.job_id, err)

    def _save_result(self, job_id: str, outcome: object) -> None:
        try:
            _write_whole(self._path(job_id, "result"), json.dumps(schema.encode(outcome)))
        except OSError as err:
            raise _full(self._folder, err) from err

    def _path(self, job_id: str, kind: str) -> Path:
        return self._folder / f"{job_id}.{kind}.json"


class RunsJobs:
    """`JobsPort` over a runner: what every service with jobs inherits."""

    def __init__(self, jobs: JobRunner) -> None:
        """Keep the runner."""
        self._jobs = jobs

    def get_job(self, job_id: str) -> Job:
        """Return the job's present state."""
        return self._jobs.get(job_id)

    def list_jobs(self) -> tuple[Job, ...]:
        """Return all jobs, newest first."""
        return self._jobs.list()

    def watch_job(self, job_id: str) -> Iterator[Job]:
        """Yield the job now and at every change until it is final."""
        return self._jobs.watch(job_id)

    def cancel_job(self, job_id: str) -> Job:
        """Ask the job to stop; a final one is left as it is."""
        return self._jobs.cancel(job_id)


def error_of_job(job: Job) -> ForetokenError:
    """Return the error a failed job ended with."""
    error = ForetokenError(job.error_message, job_id=job.job_id, job_reason=job.error_reason)
    for cls in _subclasses(ForetokenError):
        if cls.reason == job.error_reason:
            return cls(job.error_message, job_id=job.job_id)
    return error


def _subclasses(cls: type[ForetokenError]) -> Iterator[type[ForetokenError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _full(folder: Path, err: OSError) -> StorageFullError:
    return StorageFullError(
        f"the result could not be saved in {folder}: {err.strerror}; make room and create the job"
        " again"
    )


def _load(path: Path) -> Job | None:
    """Return the job of a file, none where a crash of the machine left it torn."""
    try:
        return schema.decode(Job, json.loads(path.read_text(encoding="utf-8")), path.name)
    except (ValueError, InvalidRequestError):
        _log.warning("the state of a job cannot be read and is left aside path=%s", path)
        return None


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _now() -> str:
    return datetime.now(tz=UTC).isoformat(timespec="milliseconds")
