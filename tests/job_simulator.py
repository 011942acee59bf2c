"""A simulator that only has jobs: tests add the methods they ask."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.domain.job import Job, Watch
from foretoken.domain.measurements.measurement import ArrowStream
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.search import (
    CapacityReport,
    CapacityRequest,
    Finalist,
    ServingSearchReport,
    ServingSearchRequest,
)
from foretoken.domain.requests.training_run import (
    TrainingMemoryReport,
    TrainingRunReport,
    TrainingRunRequest,
)
from foretoken.domain.requests.training_search import (
    StrategyFinalist,
    TrainingSearchReport,
    TrainingSearchRequest,
)
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.training_report import TrainingReport
from foretoken.jobs.runner import JobRunner
from foretoken.simulator.servicer import register

# Runs a command of the program with these words.
Run = Callable[..., Result]


class JobSimulator:
    """Runs jobs in a folder; to be asked anything else fails the test."""

    def __init__(self, folder: Path) -> None:
        self.jobs = JobRunner(folder)
        self.jobs.open()

    def get_job(self, job_id: str) -> Job:
        return self.jobs.get(job_id)

    def list_jobs(self) -> tuple[Job, ...]:
        return self.jobs.list()

    def watch_job(self, job_id: str) -> Iterator[Job]:
        return self.jobs.watch(job_id)

    def cancel_job(self, job_id: str) -> Job:
        return self.jobs.cancel(job_id)

    def create_serving_simulation(self, scenario: ServingScenario) -> Job:
        raise AssertionError(scenario)

    def get_serving_report(self, job_id: str) -> ServingReport:
        raise AssertionError(job_id)

    def read_serving_table(self, job_id: str, table: str) -> ArrowStream:
        raise AssertionError(job_id, table)

    def create_training_simulation(self, scenario: TrainingScenario) -> Job:
        raise AssertionError(scenario)

    def get_training_report(self, job_id: str) -> TrainingReport:
        raise AssertionError(job_id)

    def read_training_table(self, job_id: str, table: str) -> ArrowStream:
        raise AssertionError(job_id, table)

    def create_capacity_search(self, request: CapacityRequest) -> Job:
        raise AssertionError(request)

    def get_capacity_report(self, job_id: str) -> CapacityReport:
        raise AssertionError(job_id)

    def create_serving_search(self, request: ServingSearchRequest) -> Job:
        raise AssertionError(request)

    def get_serving_search_report(self, job_id: str) -> ServingSearchReport:
        raise AssertionError(job_id)

    def read_serving_search_table(self, job_id: str, table: str) -> ArrowStream:
        raise AssertionError(job_id, table)

    def watch_serving_search(self, job_id: str, first: int = 0) -> Watch[Finalist]:
        raise AssertionError(job_id, first)

    def plan_training_memory(self, scenario: TrainingScenario) -> TrainingMemoryReport:
        raise AssertionError(scenario)

    def plan_training_run(self, request: TrainingRunRequest) -> TrainingRunReport:
        raise AssertionError(request)

    def create_training_search(self, request: TrainingSearchRequest) -> Job:
        raise AssertionError(request)

    def get_training_search_report(self, job_id: str) -> TrainingSearchReport:
        raise AssertionError(job_id)

    def read_training_search_table(self, job_id: str, table: str) -> ArrowStream:
        raise AssertionError(job_id, table)

    def watch_training_search(self, job_id: str, first: int = 0) -> Watch[StrategyFinalist]:
        raise AssertionError(job_id, first)


@contextmanager
def running_against(simulator: JobSimulator, home: Path) -> Iterator[Run]:
    """Give a function that runs a command against the simulator over a real connection."""
    server = grpc.server(ThreadPoolExecutor(4))
    register(server, simulator)
    endpoint = f"simulator=127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    def invoke(*words: object) -> Result:
        root = ("--home", home, "--endpoint", endpoint)
        return CliRunner().invoke(app, [*map(str, root), *map(str, words)])

    yield invoke
    server.stop(grace=None).wait()
