"""Fakes that implement the ports in memory, for what the real services make hard to provoke."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from artifact_shelf import ArtifactShelf

from foretoken.domain import schema
from foretoken.domain.errors import UnknownDeviceError
from foretoken.domain.job import Job, WakingWatch, Watch
from foretoken.domain.measurements.estimate import (
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    Provenance,
)
from foretoken.domain.measurements.latency_models import ModelVersion, TrainRequest
from foretoken.domain.measurements.measurement import (
    ArrowStream,
    BatchReceipt,
    Coverage,
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
    RunSummary,
    Snapshot,
)
from foretoken.domain.measurements.profiling import (
    ClosureReport,
    ClosureRequest,
    GraphReport,
    GraphRequest,
    ProfileOutline,
    ProfileReport,
    ProfileRequest,
)
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.training_search import StrategyFinalist
from foretoken.domain.results.report import PredictorTrainingReport, ServingReport
from foretoken.domain.results.training_report import TrainingReport
from foretoken.jobs.runner import JobProgress, JobRunner
from foretoken.wire import ipc

Work = Callable[[JobProgress], object]


class FakeJobs:
    """Jobs of a real runner."""

    def __init__(self, folder: Path) -> None:
        self.runner = JobRunner(folder)

    def open(self) -> None:
        self.runner.open()

    def close(self) -> None:
        self.runner.close()

    def get_job(self, job_id: str) -> Job:
        return self.runner.get(job_id)

    def list_jobs(self) -> tuple[Job, ...]:
        return self.runner.list()

    def watch_job(self, job_id: str) -> Iterator[Job]:
        return self.runner.watch(job_id)

    def cancel_job(self, job_id: str) -> Job:
        return self.runner.cancel(job_id)


class FakeSimulator(FakeJobs):
    """Runs whatever work it is given, and keeps the scenarios it was asked for."""

    def __init__(self, folder: Path, work: Work) -> None:
        super().__init__(folder)
        self.work = work
        self.scenarios: list[ServingScenario | TrainingScenario] = []

    def create_serving_simulation(self, scenario: ServingScenario) -> Job:
        self.scenarios.append(scenario)
        return self.runner.create("simulate_serving", self.work)

    def get_serving_report(self, job_id: str) -> ServingReport:
        return self.runner.result(job_id, ServingReport)

    def read_serving_table(self, job_id: str, table: str) -> ArrowStream:
        report = self.get_serving_report(job_id)
        if table == "requests":
            return ipc.record_to_table(report.requests)
        return ipc.record_to_table(report.series)

    def create_training_simulation(self, scenario: TrainingScenario) -> Job:
        self.scenarios.append(scenario)
        return self.runner.create("simulate_training", self.work)

    def get_training_report(self, job_id: str) -> TrainingReport:
        return self.runner.result(job_id, TrainingReport)

    def read_training_table(self, job_id: str, table: str) -> ArrowStream:
        report = self.get_training_report(job_id)
        columns = {
            "spans": report.spans,
            "memory": report.memory_timeline,
            "traffic": report.traffic,
        }
        return ipc.record_to_table(columns[table])

    def watch_training_search(self, job_id: str, first: int = 0) -> Watch[StrategyFinalist]:
        plain = self.runner.follow(job_id, "finalists", first)
        return WakingWatch((schema.decode(StrategyFinalist, item) for item in plain), plain.close)


class FakeProfiler(FakeJobs):
    """Has one device and finds nothing to measure."""

    def list_local_devices(self) -> tuple[str, ...]:
        return ("cpu",)

    def create_profile(self, request: ProfileRequest) -> Job:
        if request.device not in self.list_local_devices():
            raise UnknownDeviceError.named(request.device, self.list_local_devices())
        return self.runner.create("profile", lambda _: ProfileReport(device=request.device))

    def get_profile_report(self, job_id: str) -> ProfileReport:
        return self.runner.result(job_id, ProfileReport)

    def outline_profile(self, request: ProfileRequest) -> ProfileOutline:
        return ProfileOutline(name=request.name or "made up", device=request.device)

    def create_graph_profile(self, request: GraphRequest) -> Job:
        report = GraphReport(device=request.device, model=request.model)
        return self.runner.create("graph", lambda _: report)

    def get_graph_report(self, job_id: str) -> GraphReport:
        return self.runner.result(job_id, GraphReport)

    def create_closure(self, request: ClosureRequest) -> Job:
        report = ClosureReport(device=request.device, model=request.model)
        return self.runner.create("closure", lambda _: report)

    def get_closure_report(self, job_id: str) -> ClosureReport:
        return self.runner.result(job_id, ClosureReport)


class FakePredictor(FakeJobs):
    """Answers every row with its index in µs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.queries: list[LatencyQuery] = []

    def create_training(self, request: TrainRequest) -> Job:
        report = PredictorTrainingReport(model_version=f"{request.device}-{request.seed}")
        return self.runner.create("train", lambda _: report)

    def get_training_report(self, job_id: str) -> PredictorTrainingReport:
        return self.runner.result(job_id, PredictorTrainingReport)

    def predict(self, query: LatencyQuery) -> LatencyReply:
        self.queries.append(query)
        tables = []
        for table in query.tables:
            latency_us = np.arange(table.num_rows, dtype=np.float64)
            tables.append(
                LatencyColumns(
                    latency_us=latency_us,
                    low_us=latency_us / 2,
                    high_us=latency_us * 2,
                    provenance=np.full(table.num_rows, Provenance.MEASURED.value),
                )
            )
        return LatencyReply(model_version="v1", tables=tuple(tables))

    def list_models(self) -> tuple[ModelVersion, ...]:
        return ()


class FakeCatalog(ArtifactShelf):
    """Keeps batches in a list. `lost` errors are raised one by one after a batch is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: dict[tuple[str, int], pa.Table] = {}
        self.lost: list[Exception] = []
        self.num_streams = 0
        self.num_open_streams = 0

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        self.num_streams += 1
        self.num_open_streams += 1
        try:
            for batch in batches:
                receipt = self._store(run, batch)
                self._lose_receipt()
                yield receipt
        finally:
            self.num_open_streams -= 1

    def read_measurements(self, selection: MeasurementFilter) -> pa.Table:
        tables = [rows for (run_id, _), rows in self.batches.items() if run_id == selection.run_id]
        return pa.concat_tables(tables)

    def describe_coverage(self) -> tuple[Coverage, ...]:
        return ()

    def list_runs(self) -> tuple[RunSummary, ...]:
        return tuple(
            RunSummary(
                run=Run(run_id=f"run-{number}", kind=RunKind.PROFILE, tool="fake"), started_at="now"
            )
            for number in range(2_345)
        )

    def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        return Snapshot(content_hash=selection.operator, num_rows=len(self.batches))

    def _lose_receipt(self) -> None:
        if self.lost:
            raise self.lost.pop(0)

    def _store(self, run: Run, batch: MeasurementBatch) -> BatchReceipt:
        key = (run.run_id, batch.batch_index)
        was_duplicate = key in self.batches
        self.batches.setdefault(key, pa.table(batch.rows))
        return BatchReceipt(
            run_id=run.run_id,
            batch_index=batch.batch_index,
            num_rows=self.batches[key].num_rows,
            was_duplicate=was_duplicate,
        )
