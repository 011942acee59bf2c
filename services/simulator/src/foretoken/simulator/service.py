"""The simulator's use cases: serving and training simulations and searches as jobs.

What simulates serving, or training, is imported where a method needs it: both are half of what a
command waits for before it begins.
"""

import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from foretoken.domain.definition import Definition, list_definitions
from foretoken.domain.errors import CancelledJobError, InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.job import Job
from foretoken.domain.ports import CatalogPort, PredictorPort
from foretoken.domain.requests.numbers import check_numbers
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.training_run import (
    TrainingMemoryReport,
    TrainingRunReport,
    TrainingRunRequest,
)
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.result import TRAINING_RUN_KIND
from foretoken.domain.results.training_report import TRAINING_TABLES, TrainingReport
from foretoken.jobs.runner import JobLimits, JobProgress, JobRunner
from foretoken.jobs.sharing import SharedJobs
from foretoken.simulator.config import SimulatorConfig
from foretoken.simulator.cost.surface_cache import SurfaceCache
from foretoken.simulator.echo import echo_serving, echo_training
from foretoken.simulator.results import ResultKeeper, attach_tables, fill_tables, open_table
from foretoken.simulator.search.jobs import (
    CAPACITY_KIND,
    SERVING_KIND,
    TRAINING_KIND,
    JobKind,
    RunsSearches,
)
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.wire.result_file import take_tables

_SERVING, _TRAINING = "serving", "training"


class SimulatorService(RunsSearches):
    """Implements `SimulatorPort`. Call `open` before use.

    Results go to the `catalog` as well, where there is one. With `sharing` jobs are those of all
    simulators of a catalog.
    """

    def __init__(
        self,
        config: SimulatorConfig,
        predictor: PredictorPort,
        catalog: CatalogPort | None = None,
        sharing: SharedJobs | None = None,
    ) -> None:
        jobs = JobRunner(
            Path(config.state_folder).expanduser(),
            num_workers=config.num_workers,
            limits=JobLimits(
                max_queued=config.max_queued_jobs, max_per_caller=config.max_jobs_per_caller
            ),
            num_workers_by_kind={
                CAPACITY_KIND: config.num_workers,
                SERVING_KIND: config.num_searches,
                TRAINING_KIND: config.num_searches,
            },
            on_success=self._keep_result,
            sharing=sharing,
        )
        self._surfaces = SurfaceCache(predictor, config.max_cached_surfaces)
        super().__init__(config, jobs, predictor, self._surfaces.get)
        self._kinds |= {
            _SERVING: JobKind(
                ServingScenario,
                self.create_serving_simulation,
                self._simulate_serving,
                self.get_serving_report,
            ),
            _TRAINING: JobKind(
                TrainingScenario,
                self.create_training_simulation,
                self._simulate_training,
                self.get_training_report,
            ),
        }
        self._results: ResultKeeper | None = None
        if catalog is not None and config.max_kept_results:
            self._results = ResultKeeper(catalog, config.max_kept_results)
        self._is_closing = threading.Event()

    def open(self) -> None:
        """Load earlier jobs; those that were left unfinished go on as configured."""
        handlers = {name: kind.resume for name, kind in self._kinds.items()}
        self._jobs.open(handlers, resumes=self._config.resumes_at_start)
        if self._config.compiles_at_start:
            threading.Thread(target=self._load_engines, name="compile", daemon=True).start()

    def close(self) -> None:
        """Stop what runs and wait for it; it may go on later."""
        self._is_closing.set()
        self._jobs.close()
        self._close_workers()
        if self._results is not None:
            self._results.close()

    def _load_engines(self) -> None:
        from foretoken.simulator.serving.compilation import load_engines

        def check() -> None:
            if self._is_closing.is_set():
                raise CancelledJobError("the service ends")

        with suppress(CancelledJobError):
            load_engines(check)

    def create_serving_simulation(self, scenario: ServingScenario) -> Job:
        """Start simulating a serving deployment.

        Raises:
            InvalidRequestError: the engine's limits, a pool or an option cannot be used.
            UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

        """
        from foretoken.simulator.serving.scenario_check import check_scenario

        check_scenario(scenario)
        return self._create(_SERVING, scenario)

    def get_serving_report(self, job_id: str) -> ServingReport:
        """Return the result of a finished serving simulation."""
        report = self._jobs.result(job_id, ServingReport)
        if not report.was_simulated:
            return report
        return fill_tables(report, self._jobs, job_id)

    def read_serving_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished serving simulation.

        Raises:
            InvalidRequestError: no such table, or the deployment could not run.

        """
        from foretoken.simulator.serving.simulation import SERVING_TABLES

        if not self._jobs.result(job_id, ServingReport).was_simulated:
            raise InvalidRequestError.of_field(
                "job_id", f"the deployment of {job_id} cannot run: there is no table of {table}"
            )
        return open_table(self._jobs, job_id, table, SERVING_TABLES)

    def _simulate_serving(self, scenario: ServingScenario, progress: JobProgress) -> ServingReport:
        from foretoken.simulator.serving.simulation import simulate_serving

        started_s = time.perf_counter()
        result = simulate_serving(scenario, self._surfaces.get, progress)
        self._statistics.observe_simulation(time.perf_counter() - started_s)
        attach_tables(result.tables, progress)
        return echo_serving(scenario, replace(result.report, job_id=progress.job_id))

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
        return self._create(_TRAINING, scenario)

    def get_training_report(self, job_id: str) -> TrainingReport:
        """Return the result of a finished training simulation."""
        report = self._jobs.result(job_id, TrainingReport)
        if report.step_time_ms == 0:
            return report
        return fill_tables(report, self._jobs, job_id)

    def read_training_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished training simulation.

        Raises:
            InvalidRequestError: no such table, or the configuration could not be timed.

        """
        if self._jobs.result(job_id, TrainingReport).step_time_ms == 0:
            raise InvalidRequestError.of_field(
                "job_id", f"the configuration of {job_id} cannot run: there is no table of {table}"
            )
        return open_table(self._jobs, job_id, table, TRAINING_TABLES)

    def _simulate_training(
        self, scenario: TrainingScenario, progress: JobProgress
    ) -> TrainingReport:
        from foretoken.simulator.training.step import simulate_training

        report = simulate_training(scenario, self._predictor, progress)
        report, tables = take_tables(report)
        attach_tables(tables, progress)
        return echo_training(scenario, replace(report, job_id=progress.job_id))

    def plan_training_memory(self, scenario: TrainingScenario) -> TrainingMemoryReport:
        """Return what a strategy must hold on every stage.

        Raises:
            as `create_training_simulation`.

        """
        from foretoken.simulator.training.memory_plan import plan_memory

        check_numbers(scenario)
        _check_hardware(scenario)
        return plan_memory(scenario)

    def list_definitions(self, kind: str) -> tuple[Definition, ...]:
        """Return the names of a kind that requests can use.

        Raises:
            InvalidRequestError: there is no such kind.

        """
        return list_definitions(kind)

    def plan_training_run(self, request: TrainingRunRequest) -> TrainingRunReport:
        """Return what a whole run takes, failures, money and a target date included.

        The answer is kept in the catalog, where there is one, without waiting for it.

        Raises:
            UnknownPluginError: no dataset or price list of that name.
            as `create_training_simulation`.

        """
        from foretoken.simulator.training.run.plan import plan_training_run

        check_numbers(request)
        _check_hardware(request.scenario)
        report = plan_training_run(request, self._predictor)
        return self._results.keep_answer(TRAINING_RUN_KIND, report) if self._results else report

    def _keep_result(self, job: Job) -> None:
        if self._results is not None:
            self._results.keep(job, self._kinds[job.kind].read(job.job_id))


def _check_hardware(scenario: TrainingScenario) -> None:
    find_device(scenario.device)
    if scenario.topology:
        find_topology(scenario.topology)
