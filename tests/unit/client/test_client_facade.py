"""The facade: waiting, progress, interruption, and what it was not given."""

from collections.abc import Iterator

import pytest

from foretoken.client.facade import Foretoken
from foretoken.client.job_wait import wait_for_job
from foretoken.domain.errors import InvalidRequestError, ServiceUnavailableError
from foretoken.domain.job import Job, JobState


class _Jobs:
    """Jobs whose states are a list."""

    def __init__(self, states: list[JobState]) -> None:
        self.states = states
        self.cancelled: list[str] = []

    def get_job(self, job_id: str) -> Job:
        return Job(job_id=job_id, kind="test", state=self.states[-1])

    def list_jobs(self) -> tuple[Job, ...]:
        return ()

    def watch_job(self, job_id: str) -> Iterator[Job]:
        for state in self.states:
            yield Job(job_id=job_id, kind="test", state=state)

    def cancel_job(self, job_id: str) -> Job:
        self.cancelled.append(job_id)
        return self.get_job(job_id)


_JOB = Job(job_id="j", kind="test", state=JobState.QUEUED)


def test_waiting_tells_every_state_and_returns_the_last() -> None:
    jobs = _Jobs([JobState.RUNNING, JobState.SUCCEEDED])
    seen: list[JobState] = []
    last = wait_for_job(jobs, _JOB, lambda job: seen.append(job.state))
    assert (last.state, seen) == (JobState.SUCCEEDED, jobs.states)
    assert jobs.cancelled == []


def test_an_interruption_cancels_the_job() -> None:
    """Ctrl-C must not leave a machine busy with what nobody waits for."""
    jobs = _Jobs([JobState.RUNNING, JobState.SUCCEEDED])

    def interrupt(_job: Job) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for_job(jobs, _JOB, interrupt)
    assert jobs.cancelled == ["j"]


def test_an_interruption_stays_one_when_the_service_is_gone() -> None:
    """Who pressed Ctrl-C must not read about a connection instead."""

    class _Gone(_Jobs):
        def cancel_job(self, job_id: str) -> Job:
            raise ServiceUnavailableError(f"no service for {job_id}")

    def interrupt(_job: Job) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for_job(_Gone([JobState.RUNNING]), _JOB, interrupt)


@pytest.mark.parametrize("name", ["catalog", "profiler", "predictor", "simulator"])
def test_a_service_that_was_not_given_is_named(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        getattr(Foretoken(), name)
    assert [name] == [violation.field for violation in caught.value.violations]


def test_a_misspelt_dtype_names_those_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="bf16"):
        Foretoken().predict("gemm", device="a30", dtype="bfloat16", m=1, n=1, k=1)


def test_connecting_sends_nothing() -> None:
    """Addresses are looked up with the first call, so services may start later."""
    with Foretoken.connect(catalog="127.0.0.1:1", predictor="127.0.0.1:1") as foretoken:
        assert foretoken.catalog is not None
        assert foretoken.predictor is not None
