"""The simulator's use cases: serving and training simulations as jobs."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.job import Job
from foretoken.domain.job_runner import JobProgress, JobRunner, RunsJobs
from foretoken.domain.ports import PredictorPort
from foretoken.domain.report import RequestColumns, SeriesColumns, ServingReport
from foretoken.domain.scenario import ServingScenario, TrainingScenario
from foretoken.domain.training_report import (
    TRAINING_TABLES,
    MemoryColumns,
    SpanColumns,
    TrainingReport,
)
from foretoken.simulator.config import SimulatorConfig
from foretoken.simulator.latency_surfaces import LatencySurfaces, SurfaceSpec, fetch_surfaces
from foretoken.simulator.serving.reference import find_scheduler
from foretoken.simulator.serving.simulation import (
    SERVING_TABLES,
    compile_engines,
    simulate_serving,
)
from foretoken.simulator.training.schedule import find_schedule
from foretoken.simulator.training.step import simulate_training
from foretoken.wire import ipc


class SimulatorService(RunsJobs):
    """Implements `SimulatorPort`. Call `open` before use."""

    def __init__(self, config: SimulatorConfig, predictor: PredictorPort) -> None:
        jobs = JobRunner(
            Path(config.state_folder).expanduser(),
            num_workers=config.num_workers,
            max_queued=config.max_queued_jobs,
        )
        super().__init__(jobs)
        self._compiles_at_start = config.compiles_at_start
        self._predictor = predictor
        self._surfaces = SurfaceCache(predictor, config.max_cached_surfaces)

    def open(self) -> None:
        """Load earlier jobs."""
        self._jobs.open()
        if self._compiles_at_start:
            threading.Thread(target=compile_engines, name="compile", daemon=True).start()

    def close(self) -> None:
        """Cancel what runs and wait for it."""
        self._jobs.close()

    def create_serving_simulation(self, scenario: ServingScenario) -> Job:
        """Start simulating a serving deployment.

        Raises:
            InvalidRequestError: the engine's limits cannot be used.
            UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

        """
        find_scheduler(scenario.engine.resolve().scheduler)
        _check_hardware(scenario)
        return self._jobs.create("serving", lambda progress: self._simulate(scenario, progress))

    def get_serving_report(self, job_id: str) -> ServingReport:
        """Return the result of a finished serving simulation."""
        report = self._jobs.result(job_id, ServingReport)
        if not report.feasibility.is_feasible:
            return report
        requests = self._open_table(job_id, "requests", SERVING_TABLES).read_all()
        series = self._open_table(job_id, "series", SERVING_TABLES).read_all()
        return replace(
            report,
            requests=ipc.table_to_record(requests, RequestColumns),
            series=ipc.table_to_record(series, SeriesColumns),
        )

    def read_serving_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished serving simulation.

        Raises:
            InvalidRequestError: no such table, or the deployment could not run.

        """
        if not self._jobs.result(job_id, ServingReport).feasibility.is_feasible:
            raise InvalidRequestError.of_field(
                "job_id", f"the deployment of {job_id} cannot run: there is no table of {table}"
            )
        return self._open_table(job_id, table, SERVING_TABLES)

    def _simulate(self, scenario: ServingScenario, progress: JobProgress) -> ServingReport:
        result = simulate_serving(scenario, self._surfaces.get, progress)
        _attach_tables(result.tables, progress)
        return replace(result.report, job_id=progress.job_id)

    def create_training_simulation(self, scenario: TrainingScenario) -> Job:
        """Start simulating a training step.

        Raises:
            UnknownDeviceError, UnknownTopologyError: no such name.
            UnknownPluginError: no such trainer profile or pipeline schedule.
            InvalidRequestError: a rule of the trainer that cannot be.

        """
        scenario.trainer.resolve()
        find_schedule(scenario.pipeline_schedule)
        _check_hardware(scenario)
        return self._jobs.create(
            "training", lambda progress: self._simulate_training(scenario, progress)
        )

    def get_training_report(self, job_id: str) -> TrainingReport:
        """Return the result of a finished training simulation."""
        report = self._jobs.result(job_id, TrainingReport)
        if report.step_time_ms == 0:
            return report
        spans = self._open_table(job_id, "spans", TRAINING_TABLES).read_all()
        memory = self._open_table(job_id, "memory", TRAINING_TABLES).read_all()
        return replace(
            report,
            spans=ipc.table_to_record(spans, SpanColumns),
            memory_timeline=ipc.table_to_record(memory, MemoryColumns),
        )

    def read_training_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished training simulation.

        Raises:
            InvalidRequestError: no such table, or the configuration could not be timed.

        """
        if self._jobs.result(job_id, TrainingReport).step_time_ms == 0:
            raise InvalidRequestError.of_field(
                "job_id", f"the configuration of {job_id} cannot run: there is no table of {table}"
            )
        return self._open_table(job_id, table, TRAINING_TABLES)

    def _simulate_training(
        self, scenario: TrainingScenario, progress: JobProgress
    ) -> TrainingReport:
        report = simulate_training(scenario, self._predictor, progress)
        records = dict(zip(TRAINING_TABLES, (report.spans, report.memory_timeline), strict=True))
        tables = {name: ipc.record_to_table(record) for name, record in records.items()}
        _attach_tables(tables, progress)
        return replace(
            report,
            spans=SpanColumns(),
            memory_timeline=MemoryColumns(),
            job_id=progress.job_id,
        )

    def _open_table(self, job_id: str, table: str, known: Sequence[str]) -> pa.RecordBatchReader:
        if table not in known:
            raise InvalidRequestError.of_field(
                "table", f"{table!r} is not one of {', '.join(known)}"
            )
        path = self._jobs.attachment(job_id, f"{table}.arrow")
        return pa.ipc.open_stream(pa.memory_map(str(path)))


class SurfaceCache:
    """Latency surfaces by what they depend on and the version of the predictor's model.

    What a predictor without a model answers is asked for again each time.
    """

    def __init__(self, predictor: PredictorPort, max_surfaces: int) -> None:
        self._predictor = predictor
        self._max_surfaces = max_surfaces
        self._kept: OrderedDict[tuple[SurfaceSpec, str], LatencySurfaces] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, spec: SurfaceSpec) -> LatencySurfaces:
        """Return the surfaces, from memory or from the predictor."""
        active = [model.version for model in self._predictor.list_models() if model.is_active]
        if len(active) != 1:
            return fetch_surfaces(spec, self._predictor)
        with self._lock:
            kept = self._kept.get((spec, active[0]))
            if kept is not None:
                self._kept.move_to_end((spec, active[0]))
                return kept
        surfaces = fetch_surfaces(spec, self._predictor)
        with self._lock:
            # The version the answer carries: training may have ended since.
            self._kept[spec, surfaces.model_version] = surfaces
            while len(self._kept) > self._max_surfaces:
                self._kept.popitem(last=False)
        return surfaces


def _attach_tables(tables: Mapping[str, pa.Table], progress: JobProgress) -> None:
    for name, table in tables.items():
        with (
            progress.attach(f"{name}.arrow") as path,
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)


def _check_hardware(scenario: ServingScenario | TrainingScenario) -> None:
    find_device(scenario.device)
    if scenario.topology:
        find_topology(scenario.topology)
