"""Jobs as callers read them: states, results and files, whichever process made them."""

from pathlib import Path
from typing import Any, TypeVar

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.job import Job, JobState, check_succeeded
from foretoken.jobs.board import JobBoard
from foretoken.jobs.folder import (
    LIST_SUFFIX,
    RESULT_FILE,
    JobFolder,
    StoredRequest,
    read_items,
)
from foretoken.jobs.sharing import SharedJobs

T = TypeVar("T")

WITHOUT_RESULT = (JobState.FAILED, JobState.CANCELLED)


class ReadsJobs:
    """What of a runner changes nothing."""

    def __init__(self, folder: JobFolder, board: JobBoard, sharing: SharedJobs | None) -> None:
        """Keep where the files and the states are."""
        self._folder = folder
        self._board = board
        self._sharing = sharing

    def get(self, job_id: str) -> Job:
        """Return the job's present state.

        Raises:
            UnknownJobError: no such job.

        """
        if self._sharing is not None and job_id not in self._board:
            self._sharing.look()
        return self._board.get(job_id)

    def list(self) -> tuple[Job, ...]:
        """Return all jobs, newest first."""
        return self._board.list()

    def request(self, job_id: str, cls: type[T]) -> T | None:
        """Return what a job was asked that has not succeeded, if that is kept.

        What it kept is in the folder of this process from then on, for a job of an equal request.

        Raises:
            InvalidRequestError: a program of another version was asked, in words of its own.

        """
        job = self.get(job_id)
        stored = self._folder.load_request(job.job_id)
        if stored is None and self._sharing is not None and job.state in WITHOUT_RESULT:
            plain = self._sharing.fetch_request(job.job_id)
            if plain is not None:
                stored = StoredRequest(request=plain)
                self._folder.save_request(job.job_id, stored)
        return None if stored is None else schema.decode(cls, stored.request)

    def result(self, job_id: str, cls: type[T]) -> T:
        """Return the result of a finished job.

        Raises:
            JobNotFinishedError: it has none yet.
            CancelledJobError: it was cancelled.
            ForetokenError: it failed; the job's own error.

        """
        check_succeeded(self._get_newest(job_id))
        self._fetch(job_id, RESULT_FILE)
        return schema.decode(cls, self._folder.load_result(job_id))

    def attachment(self, job_id: str, name: str) -> Path:
        """Return the path of a file that a finished job has attached.

        Raises:
            JobNotFinishedError, CancelledJobError, ForetokenError: as `result`.
            InvalidRequestError: it attached no such file.

        """
        check_succeeded(self._get_newest(job_id))
        self._fetch(job_id, name)
        path = self._folder.attachment(job_id, name)
        if not path.is_file():
            raise InvalidRequestError.of_field("job_id", f"job {job_id} kept no {name}")
        return path

    def published(self, job_id: str, name: str) -> tuple[Any, ...]:
        """Return what a job has published under a name by now."""
        self._fetch(job_id, f"{name}{LIST_SUFFIX}")
        return tuple(read_items(self._folder.items_file(job_id, name), 0))

    def _get_newest(self, job_id: str) -> Job:
        """Return a job as it is by now: a caller may have heard of its end from another process."""
        job = self.get(job_id)
        if self._sharing is None or job.state.is_final:
            return job
        self._sharing.look()
        return self._board.get(job_id)

    def _fetch(self, job_id: str, name: str) -> None:
        if self._sharing is not None:
            self._sharing.fetch(job_id, name)
