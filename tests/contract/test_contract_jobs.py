"""Jobs behave alike whether the service is embedded or remote."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract_fakes import FakeSimulator
from contract_reach import Reach
from contract_scenarios import SERVING, SERVING_REPORT, TRAINING, TRAINING_REPORT

from foretoken.client.services import SimulatorClient
from foretoken.domain.errors import (
    CancelledJobError,
    DeviceMemoryError,
    ForetokenError,
    JobNotFinishedError,
    QueueFullError,
    UnknownJobError,
)
from foretoken.domain.job import Job, JobState
from foretoken.domain.ports import SimulatorPort
from foretoken.jobs.runner import JobProgress
from foretoken.simulator import servicer


class _Bench:
    """A simulator whose work the test controls."""

    def __init__(self, folder: Path) -> None:
        self.may_end = threading.Event()
        self.outcome: object = SERVING_REPORT
        self.fake = FakeSimulator(folder, self._work)
        self.fake.open()

    def close(self) -> None:
        self.may_end.set()
        self.fake.close()

    def _work(self, progress: JobProgress) -> object:
        progress.update(0.25, "begun")
        while not self.may_end.wait(0.01):
            progress.update(0.25, "begun")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[_Bench]:
    bench = _Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def port(bench: _Bench, reach: Reach) -> SimulatorPort:
    return reach(bench.fake, servicer.register, SimulatorClient.connect)


def _finish(port: SimulatorPort, job: Job) -> list[Job]:
    return list(port.watch_job(job.job_id))


def test_a_serving_job_lives_from_create_to_report(bench: _Bench, port: SimulatorPort) -> None:
    job = port.create_serving_simulation(SERVING)
    assert job.state is JobState.QUEUED
    assert bench.fake.scenarios == [SERVING]
    bench.may_end.set()
    states = _finish(port, job)
    assert states[-1].state is JobState.SUCCEEDED
    assert states[-1].progress_ratio == 1.0
    assert port.get_job(job.job_id) == states[-1]
    assert port.get_serving_report(job.job_id) == SERVING_REPORT


def test_a_training_job_lives_from_create_to_report(bench: _Bench, port: SimulatorPort) -> None:
    bench.outcome = TRAINING_REPORT
    bench.may_end.set()
    job = port.create_training_simulation(TRAINING)
    assert _finish(port, job)[-1].state is JobState.SUCCEEDED
    assert bench.fake.scenarios == [TRAINING]
    assert port.get_training_report(job.job_id) == TRAINING_REPORT


def test_a_watch_shows_progress_and_ends_with_the_final_state(
    bench: _Bench, port: SimulatorPort
) -> None:
    job = port.create_serving_simulation(SERVING)
    seen = []
    for state in port.watch_job(job.job_id):
        seen.append(state)
        if state.message == "begun":
            bench.may_end.set()
    assert [state.job_id for state in seen] == [job.job_id] * len(seen)
    assert "begun" in [state.message for state in seen]
    assert [state.state.is_final for state in seen] == [False] * (len(seen) - 1) + [True]
    assert seen == sorted(seen, key=lambda state: state.progress_ratio)


def test_watching_a_final_job_yields_it_once(bench: _Bench, port: SimulatorPort) -> None:
    bench.may_end.set()
    job = port.create_serving_simulation(SERVING)
    last = _finish(port, job)[-1]
    assert _finish(port, job) == [last]


def test_a_report_is_refused_before_the_end(port: SimulatorPort) -> None:
    job = port.create_serving_simulation(SERVING)
    with pytest.raises(JobNotFinishedError):
        port.get_serving_report(job.job_id)


def test_a_cancelled_job_ends_cancelled(port: SimulatorPort) -> None:
    job = port.create_serving_simulation(SERVING)
    port.cancel_job(job.job_id)
    assert _finish(port, job)[-1].state is JobState.CANCELLED
    with pytest.raises(CancelledJobError):
        port.get_serving_report(job.job_id)


def test_cancelling_a_final_job_leaves_it(bench: _Bench, port: SimulatorPort) -> None:
    bench.may_end.set()
    job = port.create_serving_simulation(SERVING)
    last = _finish(port, job)[-1]
    assert port.cancel_job(job.job_id) == last


def test_a_failed_job_keeps_its_error(bench: _Bench, port: SimulatorPort) -> None:
    bench.outcome = DeviceMemoryError("80 GB are too few")
    bench.may_end.set()
    job = port.create_serving_simulation(SERVING)
    last = _finish(port, job)[-1]
    assert (last.state, last.error_reason) == (JobState.FAILED, "DEVICE_MEMORY")
    with pytest.raises(DeviceMemoryError, match="80 GB are too few"):
        port.get_serving_report(job.job_id)


def test_a_job_that_broke_unexpectedly_fails_with_its_message(
    bench: _Bench, port: SimulatorPort
) -> None:
    bench.outcome = ZeroDivisionError("empty batch")
    bench.may_end.set()
    job = port.create_serving_simulation(SERVING)
    assert _finish(port, job)[-1].error_reason == "INTERNAL"
    with pytest.raises(ForetokenError, match="ZeroDivisionError: empty batch"):
        port.get_serving_report(job.job_id)


@pytest.mark.parametrize(
    "ask",
    [
        lambda port: port.get_job("nobody"),
        lambda port: list(port.watch_job("nobody")),
        lambda port: port.cancel_job("nobody"),
        lambda port: port.get_serving_report("nobody"),
        lambda port: port.get_training_report("nobody"),
    ],
    ids=["get", "watch", "cancel", "serving report", "training report"],
)
def test_an_unknown_job_is_not_found(
    ask: Callable[[SimulatorPort], object], port: SimulatorPort
) -> None:
    with pytest.raises(UnknownJobError) as caught:
        ask(port)
    assert caught.value.details["name"] == "nobody"


def test_jobs_are_listed_newest_first(bench: _Bench, port: SimulatorPort) -> None:
    bench.may_end.set()
    jobs = []
    for _ in range(3):
        job = port.create_serving_simulation(SERVING)
        jobs.append(_finish(port, job)[-1])
        threading.Event().wait(0.002)  # times have a resolution of 1 ms
    assert port.list_jobs() == tuple(reversed(jobs))


def test_a_full_queue_refuses(port: SimulatorPort) -> None:
    def create_many() -> None:
        for _ in range(100):
            port.create_serving_simulation(SERVING)

    with pytest.raises(QueueFullError):
        create_many()
