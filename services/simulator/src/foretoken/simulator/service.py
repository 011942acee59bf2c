"""The simulator's use cases: serving and training simulations and searches as jobs.

What simulates serving, or training, is imported where a method needs it: both are half of what a
command waits for before it begins.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from foretoken.domain import schema
from foretoken.domain.definition import Definition, list_definitions
from foretoken.domain.errors import CancelledJobError, InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.job import Job, Watch
from foretoken.domain.ports import CatalogPort, PredictorPort
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
from foretoken.domain.results.result import TRAINING_RUN_KIND, AnyReport
from foretoken.domain.results.training_report import TRAINING_TABLES, TrainingReport
from foretoken.jobs.executor import WorkerCounts
from foretoken.jobs.runner import JobLimits, JobProgress, JobRunner, Resume, Work
from foretoken.jobs.service import RunsJobs
from foretoken.jobs.sharing import SharedJobs
from foretoken.simulator.config import SimulatorConfig
from foretoken.simulator.cost.latency_surfaces import LatencySurfaces, SurfaceSpec, fetch_surfaces
from foretoken.simulator.echo import echo_serving, echo_training
from foretoken.simulator.results import ResultKeeper, attach_tables, fill_tables, open_table
from foretoken.simulator.search.jobs import (
    CAPACITY_KIND,
    SERVING_KIND,
    TRAINING_KIND,
    SearchJobs,
)
from foretoken.simulator.statistics import SimulatorStatistics
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.wire.result_file import take_tables

S = TypeVar("S", ServingScenario, TrainingScenario)

_SERVING, _TRAINING = "serving", "training"


class SimulatorService(RunsJobs):
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
        super().__init__(jobs)
        self._shares_jobs = sharing is not None
        self._results: ResultKeeper | None = None
        if catalog is not None and config.max_kept_results:
            self._results = ResultKeeper(catalog, config.max_kept_results)
        self._config = config
        self._is_closing = threading.Event()
        self._predictor = predictor
        self._surfaces = SurfaceCache(predictor, config.max_cached_surfaces)
        self._statistics = SimulatorStatistics()
        self._searches = SearchJobs(config, jobs, predictor, self._surfaces.get, self._statistics)

    @property
    def statistics(self) -> SimulatorStatistics:
        """What was simulated and searched."""
        return self._statistics

    @property
    def workers(self) -> WorkerCounts:
        """The workers of searches."""
        return self._searches.workers

    def open(self) -> None:
        """Load earlier jobs; searches that were left unfinished go on as configured."""
        handlers: Mapping[str, Resume] = {
            _SERVING: lambda plain: self._serving_work(
                schema.decode(ServingScenario, plain, "scenario")
            ),
            _TRAINING: lambda plain: self._training_work(
                schema.decode(TrainingScenario, plain, "scenario")
            ),
        }
        self._jobs.open(
            {**handlers, **self._searches.handlers}, resumes=self._config.resumes_at_start
        )
        if self._config.compiles_at_start:
            threading.Thread(target=self._load_engines, name="compile", daemon=True).start()

    def close(self) -> None:
        """Stop what runs and wait for it; searches and shared jobs may go on later."""
        self._is_closing.set()
        self._jobs.close()
        self._searches.close()
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
        return self._jobs.create(_SERVING, self._serving_work(scenario), self._request(scenario))

    def get_serving_report(self, job_id: str) -> ServingReport:
        """Return the result of a finished serving simulation."""
        report = self._jobs.result(job_id, ServingReport)
        if not report.feasibility.is_feasible:
            return report
        return fill_tables(report, self._jobs, job_id)

    def read_serving_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished serving simulation.

        Raises:
            InvalidRequestError: no such table, or the deployment could not run.

        """
        from foretoken.simulator.serving.simulation import SERVING_TABLES

        if not self._jobs.result(job_id, ServingReport).feasibility.is_feasible:
            raise InvalidRequestError.of_field(
                "job_id", f"the deployment of {job_id} cannot run: there is no table of {table}"
            )
        return open_table(self._jobs, job_id, table, SERVING_TABLES)

    def _serving_work(self, scenario: ServingScenario) -> Work:
        return lambda progress: self._simulate(scenario, progress)

    def _training_work(self, scenario: TrainingScenario) -> Work:
        return lambda progress: self._simulate_training(scenario, progress)

    def _request(self, scenario: S) -> S | None:
        """Return what another process needs to go on; in this folder alone nothing does."""
        return scenario if self._shares_jobs else None

    def _simulate(self, scenario: ServingScenario, progress: JobProgress) -> ServingReport:
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
        return self._jobs.create(_TRAINING, self._training_work(scenario), self._request(scenario))

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

        _check_hardware(request.scenario)
        report = plan_training_run(request, self._predictor)
        return self._results.keep_answer(TRAINING_RUN_KIND, report) if self._results else report

    def create_capacity_search(self, request: CapacityRequest) -> Job:
        """Start looking for the highest rate at which a deployment meets targets.

        Raises:
            as `create_serving_simulation`.

        """
        return self._searches.create_capacity(request)

    def get_capacity_report(self, job_id: str) -> CapacityReport:
        """Return the result of a finished capacity search."""
        return self._searches.capacity_report(job_id)

    def create_serving_search(self, request: ServingSearchRequest) -> Job:
        """Start looking for the best deployments of a space.

        Raises:
            SearchTooLargeError: the space has more points than the service takes.
            as `create_serving_simulation`.

        """
        return self._searches.create_serving(request)

    def rehearse(self, request: ServingSearchRequest | TrainingSearchRequest) -> None:
        """Load and learn what a search needs, by answering it in closed form for nobody.

        Raises:
            as `create_serving_search` and `create_training_search`.

        """
        self._searches.rehearse(request)

    def resume_job(self, job_id: str) -> Job:
        """Start a search that was cancelled or failed once more, and return the new job.

        Raises:
            InvalidRequestError: what the job was asked is not kept.

        """
        return self._searches.resume(job_id)

    def get_serving_search_report(self, job_id: str) -> ServingSearchReport:
        """Return the result of a finished serving search, with its candidates."""
        return self._searches.serving_report(job_id)

    def watch_serving_search(self, job_id: str, first: int = 0) -> Watch[Finalist]:
        """Yield what the search has simulated, from the `first` on, until it ends."""
        return self._searches.watch(job_id, first)

    def read_serving_search_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished serving search: `candidates`.

        Raises:
            InvalidRequestError: no such table.

        """
        return self._searches.read_table(job_id, table)

    def create_training_search(self, request: TrainingSearchRequest) -> Job:
        """Start looking for the best training strategies of a space.

        Raises:
            SearchTooLargeError: the space has more points than the service takes.
            InvalidRequestError: the space cannot vary the scenario.
            UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

        """
        return self._searches.create_training(request)

    def get_training_search_report(self, job_id: str) -> TrainingSearchReport:
        """Return the result of a finished training search, with its candidates."""
        return self._searches.training_report(job_id)

    def watch_training_search(self, job_id: str, first: int = 0) -> Watch[StrategyFinalist]:
        """Yield what the search has simulated, from the `first` on, until it ends."""
        return self._searches.watch_training(job_id, first)

    def read_training_search_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished training search: `candidates`.

        Raises:
            InvalidRequestError: no such table.

        """
        return self._searches.read_table(job_id, table)

    def _keep_result(self, job: Job) -> None:
        if self._results is None:
            return
        read: Mapping[str, Callable[[str], AnyReport]] = {
            _SERVING: self.get_serving_report,
            _TRAINING: self.get_training_report,
            CAPACITY_KIND: self.get_capacity_report,
            SERVING_KIND: self.get_serving_search_report,
            TRAINING_KIND: self.get_training_search_report,
        }
        self._results.keep(job, read[job.kind](job.job_id))


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


def _check_hardware(scenario: TrainingScenario) -> None:
    find_device(scenario.device)
    if scenario.topology:
        find_topology(scenario.topology)
