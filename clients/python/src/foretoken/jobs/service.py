"""What every service with jobs offers of them."""

from collections.abc import Iterator

from foretoken.domain.job import Job
from foretoken.jobs.runner import JobRunner


class RunsJobs:
    """`JobsPort` over a runner: what every service with jobs inherits."""

    def __init__(self, jobs: JobRunner) -> None:
        """Keep the runner."""
        self._jobs = jobs

    @property
    def max_queued_jobs(self) -> int:
        """Jobs that may wait; more are refused."""
        return self._jobs.max_queued

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
