"""Foretoken in one object: the same calls whether the services are embedded or remote."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self, runtime_checkable

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.job_wait import OnProgress, wait_for_job
from foretoken.client.results import list_results, read_result
from foretoken.client.single_query import CallOptions, build_single_query
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.correction import Correction, CorrectionRequest
from foretoken.domain.measurements.estimate import (
    DType,
    Explanation,
    LatencyEstimate,
    Phase,
    pick_estimate,
)
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import (
    ArrowStream,
    BatchReceipt,
    CheckRequest,
    Coverage,
    MeasurementBatch,
    QualityReport,
    Run,
    SqlQuery,
)
from foretoken.domain.measurements.planning import PlanRequest, ProfilePlan
from foretoken.domain.measurements.profiling import (
    ClosureReport,
    ClosureRequest,
    GraphReport,
    GraphRequest,
    ProfileReport,
    ProfileRequest,
)
from foretoken.domain.measurements.surface import LatencySurface, SurfaceQuery
from foretoken.domain.ports import (
    CatalogAdminPort,
    PredictorPort,
    ProfilerPort,
    SimulatorPort,
)
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.search import (
    CapacityReport,
    CapacityRequest,
    ServingSearchReport,
    ServingSearchRequest,
)
from foretoken.domain.requests.training_run import (
    TrainingMemoryReport,
    TrainingRunReport,
    TrainingRunRequest,
)
from foretoken.domain.requests.training_search import (
    TrainingSearchReport,
    TrainingSearchRequest,
)
from foretoken.domain.results.report import PredictorTrainingReport, ServingReport
from foretoken.domain.results.result import AnyReport, KeptResult
from foretoken.domain.results.training_report import TrainingReport

Target = str | ChannelOptions


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


def _service(name: str) -> Any:
    return property(lambda foretoken: foretoken._find_port(name), doc=f"The {name}.")  # noqa: SLF001


class Foretoken:
    """Profile, record, train, predict and simulate, each as one call that returns its result.

    Give it the ports you need: local services, or clients; `Foretoken.connect` makes clients from
    addresses. Calls that wait for a job take `on_progress`, which is given the job at each change;
    interrupting such a call (Ctrl-C) cancels the job.
    """

    def __init__(
        self,
        *,
        catalog: CatalogAdminPort | None = None,
        profiler: ProfilerPort | None = None,
        predictor: PredictorPort | None = None,
        simulator: SimulatorPort | None = None,
    ) -> None:
        """Keep the ports."""
        self._ports: dict[str, object] = {
            "catalog": catalog,
            "profiler": profiler,
            "predictor": predictor,
            "simulator": simulator,
        }

    @classmethod
    def connect(
        cls,
        *,
        catalog: Target | None = None,
        profiler: Target | None = None,
        predictor: Target | None = None,
        simulator: Target | None = None,
    ) -> Self:
        """Return one that talks to services at addresses; nothing is sent before the first call."""
        # In-process users need not import gRPC.
        from foretoken.client.services import (
            CatalogClient,
            PredictorClient,
            ProfilerClient,
            SimulatorClient,
        )

        return cls(
            catalog=CatalogClient.connect(catalog) if catalog else None,
            profiler=ProfilerClient.connect(profiler) if profiler else None,
            predictor=PredictorClient.connect(predictor) if predictor else None,
            simulator=SimulatorClient.connect(simulator) if simulator else None,
        )

    def close(self) -> None:
        """Close the services or connections it was given."""
        for port in reversed(self._ports.values()):
            if isinstance(port, _Closable):
                port.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the services or connections it was given."""
        self.close()

    catalog: CatalogAdminPort = _service("catalog")
    profiler: ProfilerPort = _service("profiler")
    predictor: PredictorPort = _service("predictor")
    simulator: SimulatorPort = _service("simulator")

    def _find_port(self, name: str) -> Any:
        """Return a service by its name.

        Raises:
            InvalidRequestError: it was not given.

        """
        port = self._ports[name]
        if port is None:
            raise InvalidRequestError.of_field(name, "was not given; say where it is")
        return port

    def profile(
        self, request: ProfileRequest, on_progress: OnProgress | None = None
    ) -> ProfileReport:
        """Time operators where the profiler runs, and record them in the catalog."""
        job = self.profiler.create_profile(request)
        wait_for_job(self.profiler, job, on_progress)
        return self.profiler.get_profile_report(job.job_id)

    def profile_graph(
        self, request: GraphRequest, on_progress: OnProgress | None = None
    ) -> GraphReport:
        """Trace a model where the profiler runs and time the nodes of its graph."""
        job = self.profiler.create_graph_profile(request)
        wait_for_job(self.profiler, job, on_progress)
        return self.profiler.get_graph_report(job.job_id)

    def measure_closure(
        self, request: ClosureRequest, on_progress: OnProgress | None = None
    ) -> ClosureReport:
        """Time whole steps of a model where the profiler runs, to hold predictions to."""
        job = self.profiler.create_closure(request)
        wait_for_job(self.profiler, job, on_progress)
        return self.profiler.get_closure_report(job.job_id)

    def import_measurements(
        self,
        run: Run,
        batches: Iterable[MeasurementBatch],
        on_receipt: Callable[[BatchReceipt], None] | None = None,
    ) -> tuple[BatchReceipt, ...]:
        """Store a run in the catalog, and return the receipts of its batches."""
        receipts: list[BatchReceipt] = []
        for receipt in self.catalog.record(run, batches):
            receipts.append(receipt)
            if on_receipt is not None:
                on_receipt(receipt)
        return tuple(receipts)

    def check(
        self, request: CheckRequest | None = None, on_progress: OnProgress | None = None
    ) -> QualityReport:
        """Judge stored measurements again, flag what cannot be trusted, and return the findings."""
        job = self.catalog.create_check(request or CheckRequest())
        wait_for_job(self.catalog, job, on_progress)
        return self.catalog.get_check_report(job.job_id)

    def sql(self, text: str, max_num_rows: int = 0) -> ArrowStream:
        """Return the result of a read-only SQL query over the catalog."""
        return self.catalog.query_sql(SqlQuery(text=text, max_num_rows=max_num_rows))

    def coverage(self) -> tuple[Coverage, ...]:
        """Return what the catalog knows."""
        return self.catalog.describe_coverage()

    def train(
        self, request: TrainRequest | None = None, on_progress: OnProgress | None = None
    ) -> PredictorTrainingReport:
        """Train the predictor on what the catalog holds, and wait for the report."""
        job = self.predictor.create_training(request or TrainRequest())
        wait_for_job(self.predictor, job, on_progress)
        return self.predictor.get_training_report(job.job_id)

    def predict(
        self,
        /,
        operator: str,
        *,
        device: str,
        dtype: DType | str = DType.BF16,
        phase: Phase | str = Phase.FORWARD,
        options: CallOptions | None = None,
        **dims: int,
    ) -> LatencyEstimate:
        """Return how long one operator call takes: `predict("gemm", device="a30", m=8, n=8, k=8)`.

        For many calls ask `predictor.predict` once, with columns.
        """
        query = build_single_query(
            operator, dims, device=device, dtype=dtype, phase=phase, options=options
        )
        return pick_estimate(self.predictor.predict(query))

    def explain(
        self,
        /,
        operator: str,
        *,
        device: str,
        dtype: DType | str = DType.BF16,
        phase: Phase | str = Phase.FORWARD,
        options: CallOptions | None = None,
        **dims: int,
    ) -> Explanation:
        """Return why `predict` answers what it does."""
        query = build_single_query(
            operator, dims, device=device, dtype=dtype, phase=phase, options=options
        )
        return self.predictor.explain(query)

    def tabulate(self, query: SurfaceQuery) -> LatencySurface:
        """Return the latency of one operator over a grid of its dimensions."""
        return self.predictor.tabulate(query)

    def plan(self, request: PlanRequest) -> ProfilePlan:
        """Return which points to profile next, the most useful for its cost first."""
        return self.predictor.plan_profile(request)

    def calibrate(self, request: CorrectionRequest) -> Correction:
        """Learn a correction from observations; `CallOptions.correction` applies it."""
        return self.predictor.create_correction(request)

    def simulate_serving(
        self, scenario: ServingScenario, on_progress: OnProgress | None = None
    ) -> ServingReport:
        """Simulate an inference deployment, and wait for the report."""
        job = self.simulator.create_serving_simulation(scenario)
        wait_for_job(self.simulator, job, on_progress)
        return self.simulator.get_serving_report(job.job_id)

    def read_serving_table(self, report: ServingReport, table: str) -> ArrowStream:
        """Return a table of a serving simulation: `requests`, `steps` or `series`."""
        return self.simulator.read_serving_table(report.job_id, table)

    def simulate_training(
        self, scenario: TrainingScenario, on_progress: OnProgress | None = None
    ) -> TrainingReport:
        """Simulate a training step, and wait for the report."""
        job = self.simulator.create_training_simulation(scenario)
        wait_for_job(self.simulator, job, on_progress)
        return self.simulator.get_training_report(job.job_id)

    def read_training_table(self, report: TrainingReport, table: str) -> ArrowStream:
        """Return a table of a training simulation: `spans` or `memory`."""
        return self.simulator.read_training_table(report.job_id, table)

    def find_capacity(
        self, request: CapacityRequest, on_progress: OnProgress | None = None
    ) -> CapacityReport:
        """Find the highest rate at which a deployment meets targets."""
        job = self.simulator.create_capacity_search(request)
        wait_for_job(self.simulator, job, on_progress)
        return self.simulator.get_capacity_report(job.job_id)

    def search_serving(
        self, request: ServingSearchRequest, on_progress: OnProgress | None = None
    ) -> ServingSearchReport:
        """Find the best deployments of a space."""
        job = self.simulator.create_serving_search(request)
        wait_for_job(self.simulator, job, on_progress)
        return self.simulator.get_serving_search_report(job.job_id)

    def plan_training_memory(self, scenario: TrainingScenario) -> TrainingMemoryReport:
        """Return what a training strategy must hold on every stage, without asking for times."""
        return self.simulator.plan_training_memory(scenario)

    def plan_training_run(self, request: TrainingRunRequest) -> TrainingRunReport:
        """Return what a whole training run takes: days, money and energy, failures included."""
        return self.simulator.plan_training_run(request)

    def search_training(
        self, request: TrainingSearchRequest, on_progress: OnProgress | None = None
    ) -> TrainingSearchReport:
        """Find the best training strategies of a space."""
        job = self.simulator.create_training_search(request)
        wait_for_job(self.simulator, job, on_progress)
        return self.simulator.get_training_search_report(job.job_id)

    def list_results(self) -> tuple[KeptResult, ...]:
        """Return what the catalog keeps of simulations and searches, newest first."""
        return list_results(self.catalog)

    def get_result(self, job_id: str) -> AnyReport:
        """Return the report of a job from the catalog, whole; the beginning of an id will do."""
        return read_result(self.catalog, job_id)[1]
