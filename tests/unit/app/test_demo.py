"""The demo measures what it goes on to ask for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from simulator_services import open_simulator

from foretoken.app.cli.demo import show_outcome
from foretoken.app.cli.state import CliState
from foretoken.app.config import AppConfig
from foretoken.app.demo import OPERATORS, run_demo
from foretoken.client.facade import Foretoken
from foretoken.domain.job import Job
from foretoken.domain.measurements.estimate import LatencyColumns, LatencyQuery, LatencyReply
from foretoken.domain.measurements.latency_models import ModelVersion, TrainRequest
from foretoken.domain.measurements.profiling import ProfileReport, ProfileRequest
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.jobs.runner import JobRunner
from foretoken.jobs.service import RunsJobs


class _Profiler(RunsJobs):
    """Measures nothing, and keeps what it was asked for."""

    def __init__(self, jobs: JobRunner) -> None:
        super().__init__(jobs)
        self.requests: list[ProfileRequest] = []

    def list_local_devices(self) -> tuple[str, ...]:
        return ("cpu",)

    def create_profile(self, request: ProfileRequest) -> Job:
        self.requests.append(request)
        return self._jobs.create("profile", lambda _: ProfileReport(device=request.device))

    def get_profile_report(self, job_id: str) -> ProfileReport:
        return self._jobs.result(job_id, ProfileReport)


@dataclass
class _Asked:
    operators: set[str] = field(default_factory=set)


class _Predictor(RunsJobs):
    """Takes a hundred µs for every call, and keeps which operators it was asked for."""

    def __init__(self, jobs: JobRunner) -> None:
        super().__init__(jobs)
        self.asked = _Asked()

    def create_training(self, request: TrainRequest) -> Job:
        del request
        return self._jobs.create("train", lambda _: PredictorTrainingReport())

    def get_training_report(self, job_id: str) -> PredictorTrainingReport:
        return self._jobs.result(job_id, PredictorTrainingReport)

    def predict(self, query: LatencyQuery) -> LatencyReply:
        self.asked.operators |= {table.operator for table in query.tables}
        return LatencyReply(model_version="v1", tables=tuple(map(_hundred_us, query.tables)))

    def list_models(self) -> Sequence[ModelVersion]:
        return ()


def _hundred_us(table: object) -> LatencyColumns:
    latency_us = np.full(table.num_rows, 100.0)  # type: ignore[attr-defined]
    return LatencyColumns(
        latency_us=latency_us,
        low_us=latency_us / 2,
        high_us=latency_us * 2,
        provenance=np.ones(len(latency_us), dtype=np.int64),
    )


@contextmanager
def _silent(_title: str) -> Iterator[Callable[[Job], None]]:
    yield lambda _job: None


def test_the_demo_profiles_every_operator_it_simulates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says so where too few points were timed to hold any out of training."""
    jobs = JobRunner(tmp_path / "jobs")
    jobs.open()
    profiler, predictor = _Profiler(jobs), _Predictor(jobs)
    simulator = open_simulator(tmp_path / "simulator", predictor)  # type: ignore[arg-type]
    foretoken = Foretoken(
        profiler=profiler,
        predictor=predictor,  # type: ignore[arg-type]
        simulator=simulator,
    )
    outcome = run_demo(foretoken, _silent)
    simulator.close()
    jobs.close()
    assert set(OPERATORS) == predictor.asked.operators
    assert [OPERATORS] == [request.operators for request in profiler.requests]
    show_outcome(CliState(config=AppConfig()), outcome)
    shown = capsys.readouterr()
    assert "too few to hold some out" in shown.err
    assert "mean error" not in shown.out
