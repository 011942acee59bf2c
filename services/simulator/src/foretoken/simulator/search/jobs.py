"""Searches as jobs: checked before they start, resumed after a restart, watched as they find."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, SearchTooLargeError
from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.job import Job, JobState, WakingWatch, Watch
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.numbers import check_numbers
from foretoken.domain.requests.question import Asked, name_request
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
from foretoken.domain.results.result import AnyReport
from foretoken.jobs.executor import Executor, WorkerCounts
from foretoken.jobs.executors.choice import open_executor
from foretoken.jobs.runner import JobProgress, JobRunner, Work
from foretoken.jobs.service import RunsJobs
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


@dataclass(frozen=True, slots=True)
class JobKind:
    """What jobs of a kind are asked, what begins and does them, and what reads their report."""

    request: type[Any]
    create: Callable[[Any], Job]
    run: Callable[[Any, JobProgress], AnyReport]
    read: Callable[[str], AnyReport]

    def resume(self, plain: Any) -> Work:
        """Return the work of a job that goes on, by its request as it is kept."""
        return partial(self.run, schema.decode(self.request, plain, "request"))


class RunsSearches(RunsJobs):
    """The searches of a simulator: capacity, serving and training, on the workers they share."""

    def __init__(
        self,
        config: SimulatorConfig,
        jobs: JobRunner,
        predictor: PredictorPort,
        fetch: "FetchSurfaces",
    ) -> None:
        super().__init__(jobs)
        self._config = config
        self._statistics = SimulatorStatistics()
        self._fetch = fetch
        self._predictor = predictor
        self._executor: Executor | None = None
        self._lock = threading.Lock()
        self._kinds: dict[str, JobKind] = {
            CAPACITY_KIND: JobKind(
                CapacityRequest,
                self.create_capacity_search,
                self._find_capacity,
                self.get_capacity_report,
            ),
            SERVING_KIND: JobKind(
                ServingSearchRequest,
                self.create_serving_search,
                self._search_serving,
                self.get_serving_search_report,
            ),
            TRAINING_KIND: JobKind(
                TrainingSearchRequest,
                self.create_training_search,
                self._search_training,
                self.get_training_search_report,
            ),
        }

    @cached_property
    def _serving_search(self) -> "ServingSearch":
        from foretoken.simulator.search.serving.search import ServingSearch

        return ServingSearch(self._predictor)

    @property
    def statistics(self) -> SimulatorStatistics:
        """What was simulated and searched."""
        return self._statistics

    @property
    def workers(self) -> WorkerCounts:
        """The workers; none before the first search needs them."""
        with self._lock:
            return self._executor.workers if self._executor else WorkerCounts()

    def _close_workers(self) -> None:
        """Let the workers go; the jobs have ended."""
        with self._lock:
            if self._executor is not None:
                self._executor.close()

    def resume_job(self, job_id: str) -> Job:
        """Start a job that was cancelled or failed once more, and return the new one.

        Raises:
            InvalidRequestError: what it was asked is not kept.
            as what created it.

        """
        job = self._jobs.get(job_id)
        if job.state not in (JobState.CANCELLED, JobState.FAILED):
            return job
        kind = self._kinds[job.kind]
        request = self._jobs.request(job_id, kind.request)
        if request is not None:
            return kind.create(request)
        raise InvalidRequestError.of_field(
            "job_id", f"what {job_id} was asked is not kept: ask it again"
        )

    def create_capacity_search(self, request: CapacityRequest) -> Job:
        """Start looking for the highest rate at which a deployment meets targets.

        Raises:
            as `check_scenario`.

        """
        from foretoken.simulator.serving.scenario_check import check_scenario

        request = _as_kept(request)
        check_scenario(request.scenario)
        return self._create(CAPACITY_KIND, request)

    def create_serving_search(self, request: ServingSearchRequest) -> Job:
        """Start looking for the best deployments of a space.

        Raises:
            SearchTooLargeError: the space, or the number of finalists, is above the limit.
            UnknownDeviceError, UnknownPluginError: the space names what there is not.
            as `check_scenario`.

        """
        return self._create(SERVING_KIND, self._check_serving(request))

    def create_training_search(self, request: TrainingSearchRequest) -> Job:
        """Start looking for the best training strategies of a space.

        Raises:
            SearchTooLargeError: the space, or the number of finalists, is above the limit.
            UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.
            InvalidRequestError: the space cannot vary the scenario.

        """
        return self._create(TRAINING_KIND, self._check_training(request))

    def warm_up(self, request: ServingSearchRequest | TrainingSearchRequest) -> None:
        """Answer a question in closed form for nobody, so that the next finds all in memory.

        Raises:
            as `create_serving_search` and `create_training_search`.

        """
        if isinstance(request, ServingSearchRequest):
            asked = self._check_serving(replace(request, num_finalists=0, has_sensitivity=False))
            self._serving_search.run(asked, InlineContext())
            return
        from foretoken.simulator.search.training.search import search_training

        training = self._check_training(replace(request, num_finalists=0, has_sensitivity=False))
        search_training(training, self._predictor, InlineContext())

    def get_capacity_report(self, job_id: str) -> CapacityReport:
        """Return the result of a finished capacity search."""
        return self._jobs.result(job_id, CapacityReport)

    def get_serving_search_report(self, job_id: str) -> ServingSearchReport:
        """Return the result of a finished serving search, with its candidates."""
        return fill_tables(self._jobs.result(job_id, ServingSearchReport), self._jobs, job_id)

    def get_training_search_report(self, job_id: str) -> TrainingSearchReport:
        """Return the result of a finished training search, with its candidates."""
        return fill_tables(self._jobs.result(job_id, TrainingSearchReport), self._jobs, job_id)

    def read_serving_search_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished serving search: `candidates`.

        Raises:
            InvalidRequestError: no such table.

        """
        return open_table(self._jobs, job_id, table, SEARCH_TABLES)

    def read_training_search_table(self, job_id: str, table: str) -> pa.RecordBatchReader:
        """Return a table of a finished training search; as `read_serving_search_table`."""
        return open_table(self._jobs, job_id, table, SEARCH_TABLES)

    def watch_serving_search(self, job_id: str, first: int = 0) -> Watch[Finalist]:
        """Yield finalists from the `first` on, as they are found, until the search ends."""
        return self._follow(job_id, SERVING_KIND, first, Finalist)

    def watch_training_search(self, job_id: str, first: int = 0) -> Watch[StrategyFinalist]:
        """Yield finalists from the `first` on, as they are found, until the search ends."""
        return self._follow(job_id, TRAINING_KIND, first, StrategyFinalist)

    def _create(self, kind: str, request: Asked) -> Job:
        """Create a job; one whose request is kept goes on after a restart."""
        check_numbers(request)
        work = partial(self._kinds[kind].run, request)
        return self._jobs.create(kind, work, request, name_request(request))

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
        from foretoken.simulator.search.serving.space import check_bases

        request = _as_kept(request)
        check_bases(request)
        for device in request.space.devices:
            find_device(device)
        for profile in request.space.profiles:
            find_engine(profile)
        for router in request.space.routers:
            find_router(router)
        self._check_size(request.num_finalists, count_points(request), "search_points")
        return request

    def _check_training(self, request: TrainingSearchRequest) -> TrainingSearchRequest:
        from foretoken.simulator.search.training.search import count_points

        request = _as_kept(request)
        _check_training_names(request)
        self._check_size(request.num_finalists, count_points(request), "training_points")
        return request

    def _find_capacity(self, request: CapacityRequest, progress: JobProgress) -> CapacityReport:
        from foretoken.simulator.search.capacity.find import find_capacity

        with JobContext(self._open_executor(), progress, self._statistics) as context:
            report = find_capacity(request, self._fetch, context)
        return echo_capacity(request, replace(report, job_id=progress.job_id))

    def _search_serving(
        self, request: ServingSearchRequest, progress: JobProgress
    ) -> ServingSearchReport:
        from foretoken.simulator.serving.compilation import must_compile_any

        executor = self._open_executor()
        schedulers = schedulers_of(request)
        if request.num_finalists and must_compile_any(schedulers):
            progress.update(0.0, "compile the engine, once on this machine")
            compile_in_worker(executor, schedulers, progress.check)
        with JobContext(executor, progress, self._statistics) as context:
            report = self._serving_search.run(request, context)
            num_workers = report.num_workers or context.num_workers
        self._statistics.observe_evaluated(report.num_evaluated)
        report = replace(report, num_workers=num_workers, job_id=progress.job_id)
        report, tables = take_tables(echo_serving_search(request, report))
        attach_tables(tables, progress)
        return report

    def _search_training(
        self, request: TrainingSearchRequest, progress: JobProgress
    ) -> TrainingSearchReport:
        from foretoken.simulator.search.training.search import search_training

        with JobContext(self._open_executor(), progress, self._statistics) as context:
            report = search_training(request, self._predictor, context)
        self._statistics.observe_evaluated(report.num_legal)
        report = replace(report, job_id=progress.job_id)
        report, tables = take_tables(echo_training_search(request, report))
        attach_tables(tables, progress)
        return report

    def _open_executor(self) -> Executor:
        with self._lock:
            if self._executor is None:
                self._executor = open_executor(
                    self._config.ray_address,
                    self._config.num_search_workers,
                    field="simulator.ray_address",
                )
            return self._executor

    def _check_size(self, num_finalists: int, num_points: int, setting: str) -> None:
        _check_limit(
            "finalists to simulate", num_finalists, self._config.max_finalists, "finalists"
        )
        limit = getattr(self._config, f"max_{setting}")
        _check_limit("points in the space", num_points, limit, setting)


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
