"""Wait for a job of any service."""

from collections.abc import Callable
from contextlib import suppress

from foretoken.domain.errors import ForetokenError
from foretoken.domain.job import Job
from foretoken.domain.ports import JobsPort

OnProgress = Callable[[Job], None]


def wait_for_job(jobs: JobsPort, job: Job, on_progress: OnProgress | None = None) -> Job:
    """Return the job once it is final, however it ended; an interruption cancels it."""
    try:
        for state in jobs.watch_job(job.job_id):
            job = state
            if on_progress is not None:
                on_progress(state)
    except KeyboardInterrupt:
        # A service that is gone cannot be notified; the interruption still is what happened.
        with suppress(ForetokenError):
            jobs.cancel_job(job.job_id)
        raise
    return job
