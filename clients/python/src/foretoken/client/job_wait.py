"""Wait for a job of any service."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from foretoken.domain.errors import ForetokenError
from foretoken.domain.job import Job

if TYPE_CHECKING:
    from foretoken.domain.ports import JobsPort

_log = logging.getLogger(__name__)

OnProgress = Callable[[Job], None]


def wait_for_job(jobs: "JobsPort", job: Job, on_progress: OnProgress | None = None) -> Job:
    """Return the job once it is final, however it ended; an interruption cancels it."""
    try:
        for state in jobs.watch_job(job.job_id):
            job = state
            if on_progress is not None:
                on_progress(state)
    except KeyboardInterrupt:
        try:
            jobs.cancel_job(job.job_id)
        except ForetokenError as err:
            # The interruption still is what happened.
            _log.warning("job %s may go on: %s", job.job_id, err.message)
        raise
    return job
