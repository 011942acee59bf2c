"""Searches as jobs: checked before they start, resumed after a restart, watched as they find."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, SearchTooLargeError
from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.job import Job, JobState, WakingWatch, Watch
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.search import (
    CapacityReport,
    CapacityRequest,
    Finalist,
    ServingSearchReport,
    ServingSearchRequest,
)
from foretoken.domain.requests.training_search import (
    StrategyFinalist,
    TrainingSearchReport,
    TrainingSearchRequest,
)
from foretoken.jobs.executor import Executor, WorkerCounts
from foretoken.jobs.executors.choice import open_executor
from foretoken.jobs.runner import JobProgress, JobRunner, Resume, Work
from foretoken.simulator.cluster.routing import find_router
from foretoken.simulator.config import SimulatorConfig
from foretoken.simulator.echo import echo_capacity, echo_serving_search, echo_training_search
from foretoken.simulator.results import attach_tables, fill_tables, open_table
from foretoken.simulator.search.context import FINALISTS, InlineContext, JobContext
from foretoken.simulator.statistics import SimulatorStatistics
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.wire.result_file import take_tables

if TYPE_CHECKING:
    from foretoken.simulator.search.serving.search import ServingSearch
    from foretoken.simulator.serving.simulation import FetchSurfaces


def schedulers_of(request: ServingSearchRequest) -> tuple[str, ...]:
    """Return the schedulers of the engines that a search tries, by name.

    Raises:
        InvalidRequestError: a rule of the engine that there is not.
        UnknownPluginError: there is no engine of that name.

    """
    own = request.scenario.engine
    engines = [replace(own, profile=name) for name in request.space.profiles or (own.profile,)]
    return tuple(dict.fromkeys(engine.resolve().scheduler for engine in engines))


def compile_in_worker(
    executor: Executor, schedulers: Sequence[str], check: Callable[[], None]
) -> None:
    """Let one worker compile what the others load; `check` as of `Executor.run`.

    Not this process, whose other threads would wait meanwhile.
    """
    list(executor.run(_compile, (0,), schedulers, check))


def _compile(_item: int, schedulers: Sequence[str]) -> None:
    from foretoken.simulator.serving.compilation import compile_engines

    compile_engines(schedulers)


F = TypeVar("F", Finalist, StrategyFinalist)
Q = TypeVar("Q", CapacityRequest, ServingSearchRequest, TrainingSearchRequest)

CAPACITY_KIND = "capacity"
SERVING_KIND = "serving-search"
TRAINING_KIND = "training-search"
SEARCH_TABLES = ("candidates",)


class SearchJobs:
    """Runs capacity, serving and training searches on the workers they share."""

    def __init__(
        self,
        config: SimulatorConfig,
        jobs: JobRunner,
        predictor: PredictorPort,
        fetch: "FetchSurfaces",
        statistics: SimulatorStatistics,
    ) -> None:
        self._config = config
        self._statistics = statistics
        self._jobs = jobs
        self._fetch = fetch
        self._predictor = predictor
        self._executor: Executor | None = None
        self._lock = threading.Lock()

    @cached_property
    def _search(self) -> "ServingSearch":
        from foretoken.simulator.search.serving.search import ServingSearch

        return ServingSearch(self._predictor)

    @property
    def handlers(self) -> Mapping[str, Resume]:
        """What makes the work of a job that goes on, by its kind."""
        return {
            CAPACITY_KIND: lambda plain: self._capacity_work(
                schema.decode(CapacityRequest, plain, "request")
            ),
            SERVING_KIND: lambda plain: self._serving_work(
                schema.decode(ServingSearchRequest, plain, "request")
            ),
            TRAINING_KIND: lambda plain: self._training_work(
                schema.decode(TrainingSearchRequest, plain, "request")
            ),
        }

    @property
    def workers(self) -> WorkerCounts:
        """The workers; none before the first search needs them."""
        with self._lock:
            return self._executor.workers if self._executor else WorkerCounts()

    def close(self) -> None:
        """Let the workers go; the jobs have ended."""
        with self._lock:
            if self._executor is not None:
                self._executor.close()

    def resume(self, job_id: str) -> Job:
        """Create the search of a job again, which was cancelled or failed.

        Raises:
            InvalidRequestError: the job is no search, or what it was asked is not kept.
            as what created it.

        """
        job = self._jobs.get(job_id)
        if job.state not in (JobState.CANCELLED, JobState.FAILED):
            return job
        create: Mapping[str, tuple[type[Any], Callable[[Any], Job]]] = {
            CAPACITY_KIND: (CapacityRequest, self.create_capacity),
            SERVING_KIND: (ServingSearchRequest, self.create_serving),
            TRAINING_KIND: (TrainingSearchRequest, self.create_training),
        }
        if job.kind in create:
            cls, again = create[job.kind]
            request = self._jobs.request(job_id, cls)
            if request is not None:
                return again(request)
        raise InvalidRequestError.of_field(
            "job_id", f"what {job_id} was asked is not kept: ask it again"
        )

    def create_capacity(self, request: CapacityRequest) -> Job:
        """Start looking for the highest rate at which a deployment meets targets.

        Raises:
            as `check_scenario`.

        """
        from foretoken.simulator.serving.scenario_check import check_scenario

        request = _as_kept(request)
        check_scenario(request.scenario)
        return self._jobs.create(CAPACITY_KIND, self._capacity_work(request), request)

    def create_serving(self, request: ServingSearchRequest) -> Job:
        """Start looking for the best deployments of a space.

        Raises:
            SearchTooLargeError: the space, or the number of finalists, is above the limit.
            UnknownDeviceError, UnknownPluginError: the space names what there is not.
            as `check_scenario`.

        """
        request = self._check_serving(request)
        return self._jobs.create(SERVING_KIND, self._serving_work(request), request)

    def create_training(self, request: TrainingSearchRequest) -> Job:
        """Start looking for the best training strategies of a space.

        Raises:
            SearchTooLargeError: the space, or the number of finalists, is above the limit.
            UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.
            InvalidRequestError: the space cannot vary the scenario.

        """
        request = self._check_training(request)
        return self._jobs.create(TRAINING_KIND, self._training_work(request), request)

    def rehearse(self, request: ServingSearchRequest | TrainingSearchRequest) -> None:
        """Answer a question in closed form for nobody, so that the next finds all in memory.

        Raises:
            as `create_serving` and `create_training`.

        """
        if isinstance(request, ServingSearchRequest):
            asked = self._check_serving(replace(request, num_finalists=0, has_sensitivity=False))
            self._search.run(asked, InlineContext())
            return
        from foretoken.simulator.search.training.search import search_training

        training = self._check_training(replace(request, num_finalists=0, has_sensitivity=False))
        search_training(training, self._predictor, InlineContext())

    def capacity_report(self, job_id: str) -> CapacityReport:
        """Return the result of a finished capacity search."""
        return self._jobs.result(job_id, CapacityReport)

    def serving_report(self, job_id: str) -> ServingSearchReport:
        """Return the result of a finished serving search, with its candidates."""
        return fill_tables(self._jobs.result(job_id, ServingSearchReport), self._jobs, job_id)

    def training_report(self, job_id: str) -> TrainingSearchReport:
        """Return the result of a finished training search, with its candidates."""
        return fill_tables(self._jobs.result(job_id, TrainingSearchReport), self._jobs, job_id)

    def watch_training(self, job_id: str, first: int) -> Watch[StrategyFinalist]:
        """Yield finalists from the `first` on, as they are found, until the search ends."""
        return self._follow(job_id, TRAINING_KIND, first, StrategyFinalist)

    def read_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished serving or training search.

        Raises:
            InvalidRequestError: no such table.

        """
        return open_table(self._jobs, job_id, table, SEARCH_TABLES)

    def watch(self, job_id: str, first: int) -> Watch[Finalist]:
        """Yield finalists from the `first` on, as they are found, until the search ends."""
        return self._follow(job_id, SERVING_KIND, first, Finalist)

    def _follow(self, job_id: str, kind: str, first: int, cls: type[F]) -> Watch[F]:
        if self._jobs.get(job_id).kind != kind:
            words = kind.replace("-", " ")
            raise InvalidRequestError.of_field("job_id", f"{job_id} is not a {words}")
        if first < 0:
            raise InvalidRequestError.of_field("first", "must not be negative")
        plain = self._jobs.follow(job_id, FINALISTS, first)
        return WakingWatch((schema.decode(cls, item) for item in plain), plain.close)

    def _check_serving(self, request: ServingSearchRequest) -> ServingSearchRequest:
        from foretoken.simulator.search.serving.search import count_points
        from foretoken.simulator.serving.scenario_check import check_scenario

        request = _as_kept(request)
        check_scenario(request.scenario)
        for device in request.space.devices:
            find_device(device)
        for profile in request.space.profiles:
            find_engine(profile)
        for router in request.space.routers:
            find_router(router)
        _check_limit(
            "finalists to simulate", request.num_finalists, self._config.max_finalists, "finalists"
        )
        _check_limit(
            "points in the space",
            count_points(request),
            self._config.max_search_points,
            "search_points",
        )
        return request

    def _check_training(self, request: TrainingSearchRequest) -> TrainingSearchRequest:
        from foretoken.simulator.search.training.search import count_points

        request = _as_kept(request)
        _check_training_names(request)
        _check_limit(
            "finalists to simulate", request.num_finalists, self._config.max_finalists, "finalists"
        )
        _check_limit(
            "points in the space",
            count_points(request),
            self._config.max_training_points,
            "training_points",
        )
        return request

    def _capacity_work(self, request: CapacityRequest) -> Work:
        def work(progress: JobProgress) -> CapacityReport:
            from foretoken.simulator.search.capacity.find import find_capacity

            with JobContext(self._open_executor(), progress, self._statistics) as context:
                report = find_capacity(request, self._fetch, context)
            return echo_capacity(request, replace(report, job_id=progress.job_id))

        return work

    def _serving_work(self, request: ServingSearchRequest) -> Work:
        def work(progress: JobProgress) -> ServingSearchReport:
            from foretoken.simulator.serving.compilation import must_compile_any

            executor = self._open_executor()
            schedulers = schedulers_of(request)
            if request.num_finalists and must_compile_any(schedulers):
                progress.update(0.0, "compile the engine, once on this machine")
                compile_in_worker(executor, schedulers, progress.check)
            with JobContext(executor, progress, self._statistics) as context:
                report = self._search.run(request, context)
                num_workers = report.num_workers or context.num_workers
            self._statistics.observe_evaluated(report.num_evaluated)
            report = replace(report, num_workers=num_workers, job_id=progress.job_id)
            report, tables = take_tables(echo_serving_search(request, report))
            attach_tables(tables, progress)
            return report

        return work

    def _training_work(self, request: TrainingSearchRequest) -> Work:
        def work(progress: JobProgress) -> TrainingSearchReport:
            from foretoken.simulator.search.training.search import search_training

            with JobContext(self._open_executor(), progress, self._statistics) as context:
                report = search_training(request, self._predictor, context)
            self._statistics.observe_evaluated(report.num_legal)
            report = replace(report, job_id=progress.job_id)
            report, tables = take_tables(echo_training_search(request, report))
            attach_tables(tables, progress)
            return report

        return work

    def _open_executor(self) -> Executor:
        with self._lock:
            if self._executor is None:
                self._executor = open_executor(
                    self._config.ray_address,
                    self._config.num_search_workers,
                    field="simulator.ray_address",
                )
            return self._executor


def _as_kept(request: Q) -> Q:
    """Return a request as a restart finds it: 2000 is 2000.0 where a field is a float.

    So the items of a job that goes on are those of the job that began.
    """
    return schema.decode(type(request), schema.encode(request), "request")


def _check_training_names(request: TrainingSearchRequest) -> None:
    """Refuse devices, links and schedules there are not."""
    scenario, space = request.scenario, request.space
    groups = space.node_groups
    for device in (scenario.device, *space.devices, *(group.device for group in groups)):
        find_device(device)
    for topology in (scenario.topology, *(group.topology for group in groups)):
        if topology:
            find_topology(topology)
    for schedule in (scenario.pipeline_schedule, *space.pipeline_schedules):
        find_schedule(schedule)


def _check_limit(what: str, number: int, limit: int, setting: str) -> None:
    if number > limit:
        raise SearchTooLargeError(
            f"{number:,} {what} are more than the {limit:,} this service takes: ask for less, or"
            f" raise simulator.max_{setting}",
            number=str(number),
            limit=str(limit),
        )
