"""Which shared jobs a process takes, and what it does with one: go on, end it, leave it."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foretoken import __version__
from foretoken.domain.errors import ForetokenError
from foretoken.domain.job import Job, JobState
from foretoken.domain.job_record import JobRecord
from foretoken.jobs.board import JobBoard
from foretoken.jobs.progress import JobProgress
from foretoken.jobs.sharing import SharedJobs, interrupted

_log = logging.getLogger(__name__)

# A job that was begun so often, and each time ended its process, is not begun again.
MAX_STARTS = 5

Work = Callable[[JobProgress], object]
# Makes the work of a job that goes on from its request, as plain data.
Resume = Callable[[Any], Work]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSteps:
    """What a runner does with a job: give it a thread, begin it, stop it, end it, give it up.

    `find_resume` gives what makes the work of a kind, if this process knows it.
    """

    submit: Callable[[Job, Callable[[], None]], None]
    begin: Callable[[str, Work], None]
    stop: Callable[[str], None]
    finish: Callable[[str, JobState, str, str], bool]
    give_up: Callable[[Job, str], None]
    find_resume: Callable[[str], Resume | None]
    is_closing: Callable[[], bool]


class JobTaking:
    """Takes what nobody works on; a job is in one thread of this process at a time."""

    def __init__(self, sharing: SharedJobs, board: JobBoard, steps: RunnerSteps) -> None:
        """Begin with nothing taken."""
        self._sharing = sharing
        self._board = board
        self._steps = steps
        # What waits for a thread here or has one, and what this program cannot do.
        self._taken: set[str] = set()
        self._refused: set[str] = set()

    def take(self, job: Job, work: Work | None = None) -> None:
        """Let a job run here when a thread is free, unless another process was faster."""
        with self._board.changed:
            is_known = work is not None or self._steps.find_resume(job.kind) is not None
            if is_known and job.job_id not in self._taken | self._refused:
                self._taken.add(job.job_id)
                self._steps.submit(job, lambda: self._run(job.job_id, work))

    def see(self, record: JobRecord) -> None:
        """Take notice of a job of another process, or that one of this is not wanted any more."""
        job = record.job
        if self._sharing.holds(job.job_id):
            if record.is_unwanted:
                self._steps.stop(job.job_id)
            return
        with self._board.changed:
            if job.job_id in self._board and self._board.get(job.job_id).state.is_final:
                return
            self._board.put(job)
            self._board.wake(job.job_id)
        if not (job.state.is_final or record.is_leased or self._steps.is_closing()):
            self.take(job)

    def _run(self, job_id: str, work: Work | None) -> None:
        try:
            # Nobody wants it any more, or somebody else has it.
            is_over = self._board.get(job_id).state.is_final
            if is_over or (record := self._sharing.lease(job_id)) is None:
                return
            self._board.forget_items(job_id)
            if record.is_unwanted:
                self._steps.finish(job_id, JobState.CANCELLED, "", "")
            elif record.num_interruptions >= MAX_STARTS:
                why = f"services stopped {record.num_interruptions} times in it"
                self._steps.give_up(record.job, why)
            elif (begun := work or self._resume(record)) is not None:
                self._steps.begin(job_id, begun)
        finally:
            with self._board.changed:
                self._taken.discard(job_id)

    def _resume(self, record: JobRecord) -> Work | None:
        """Return the work of a job; none where it ends here, or is left to others."""
        job, resume = record.job, self._steps.find_resume(record.job.kind)
        if resume is None or not record.request_json:
            self._steps.give_up(job, "the service stopped while the job ran")
            return None
        try:
            work = resume(json.loads(record.request_json))
        except ForetokenError as err:
            if record.version == __version__:
                self._steps.finish(job.job_id, JobState.FAILED, err.reason, err.message)
            else:
                # One of another version may understand it.
                self._refused.add(job.job_id)
                self._sharing.release(interrupted(job))
            return None
        _log.info("job goes on job_id=%s progress_ratio=%.2f", job.job_id, job.progress_ratio)
        return work
