"""What the services offer each other; a local object and a gRPC client both satisfy these.

Work longer than about ten seconds is a job: a `create_*` returns at once, `watch_job` streams its
progress until it ends, the result stays until it is asked for. All methods raise `ForetokenError`s.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from foretoken.domain.definition import Definition
from foretoken.domain.job import Job, Watch
from foretoken.domain.job_record import JobRecord, JobUpdate
from foretoken.domain.measurements.correction import Correction, CorrectionRequest
from foretoken.domain.measurements.estimate import Explanation, LatencyQuery, LatencyReply
from foretoken.domain.measurements.latency_models import ModelVersion, TrainRequest
from foretoken.domain.measurements.measurement import (
    ArrowStream,
    Artifact,
    BatchReceipt,
    CheckRequest,
    CompactReport,
    Coverage,
    MeasuredSubject,
    MeasurementBatch,
    MeasurementFilter,
    PruneReport,
    PruneRequest,
    QualityReport,
    Run,
    RunSummary,
    Snapshot,
    SnapshotDiff,
    SqlQuery,
)
from foretoken.domain.measurements.planning import PlanRequest, ProfilePlan
from foretoken.domain.measurements.profiling import (
    ClosureReport,
    ClosureRequest,
    GraphReport,
    GraphRequest,
    ProfileOutline,
    ProfileReport,
    ProfileRequest,
)
from foretoken.domain.measurements.surface import LatencySurface, SurfaceQuery
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
from foretoken.domain.results.report import PredictorTrainingReport, ServingReport
from foretoken.domain.results.training_report import TrainingReport


class JobsPort(Protocol):
    """Jobs of one service."""

    def get_job(self, job_id: str) -> Job:
        """Return the job's present state."""

    def list_jobs(self) -> tuple[Job, ...]:
        """Return all jobs, newest first."""

    def watch_job(self, job_id: str) -> Iterator[Job]:
        """Yield the job now and at every change until it is final, the final state last."""

    def cancel_job(self, job_id: str) -> Job:
        """Ask the job to stop; a final job is left as it is."""


class CatalogPort(Protocol):
    """The store of all measurements."""

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk."""

    def read_measurements(self, selection: MeasurementFilter) -> ArrowStream:
        """Return the selected rows in the Arrow measurement schema."""

    def describe_coverage(self) -> tuple[Coverage, ...]:
        """Return row counts per operator, device, dtype and phase."""

    def list_runs(self) -> tuple[RunSummary, ...]:
        """Return all runs, newest first."""

    def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        """Return the content hash of what the filter selects."""

    def create_snapshot(self, selection: MeasurementFilter, holder: str = "") -> Snapshot:
        """Keep what the filter selects now, on behalf of a holder if one is named.

        The same content is the same snapshot: it gets one more holder.
        """

    def store_artifact(self, artifact: Artifact, content: Iterable[bytes]) -> Artifact:
        """Keep a file; the same name and content again changes nothing."""

    def read_artifact(self, kind: str, name: str) -> Iterator[bytes]:
        """Yield a file's content, in pieces."""

    def list_artifacts(self, kind: str) -> tuple[Artifact, ...]:
        """Return what is kept of a kind, newest first."""

    def activate_artifact(self, kind: str, name: str) -> Artifact:
        """Make this the active one of its kind."""

    def delete_artifact(self, kind: str, name: str) -> None:
        """Forget a file that is not active."""


class JobRecordsPort(Protocol):
    """Jobs of services whose processes share them: what one leaves, another goes on with."""

    def create_job_record(self, record: JobRecord) -> JobRecord:
        """Keep a new job that nobody works on yet; the same again changes nothing."""

    def lease_job(self, job_id: str, worker: str, lease_s: float) -> JobRecord:
        """Give a job to a worker for so long, with what was requested.

        Raises:
            UnknownJobError: it is not kept.
            JobLeaseError: another worker has it, or it has ended.

        """

    def update_job(self, update: JobUpdate) -> JobRecord:
        """Store what the worker of a lease has to say.

        Raises:
            UnknownJobError: it is not kept.
            JobLeaseError: the lease is another's by now, or the job has ended.

        """

    def stop_job(self, job_id: str) -> JobRecord:
        """Want a job no more: its worker is to stop, and where it has none it ends at once."""

    def list_job_records(self, service: str, after: int = 0) -> tuple[JobRecord, ...]:
        """Return the jobs of a service that changed after that number, and those not ended."""

    def get_job_record(self, job_id: str) -> JobRecord:
        """Return a job as it is now, with what was requested.

        Raises:
            UnknownJobError: it is not kept.

        """

    def read_job_file(self, job_id: str, name: str, first_byte: int = 0) -> Iterator[bytes]:
        """Yield a file of a job from the `first_byte` on; nothing where there is none."""


class CatalogAdminPort(CatalogPort, JobRecordsPort, JobsPort, Protocol):
    """Everything people and operators do with the catalog, in addition to what services need."""

    def query_sql(self, query: SqlQuery) -> ArrowStream:
        """Return the result of a read-only SQL query."""

    def list_devices(self) -> tuple[MeasuredSubject, ...]:
        """Return the devices that were measured, by name."""

    def list_models(self) -> tuple[MeasuredSubject, ...]:
        """Return the models whose layers were measured, by name."""

    def list_snapshots(self) -> tuple[Snapshot, ...]:
        """Return the stored snapshots, newest first."""

    def diff_snapshots(self, before: str, after: str) -> SnapshotDiff:
        """Return what the rows of two stored snapshots differ in."""

    def release_snapshot(self, content_hash: str, holder: str) -> Snapshot:
        """Take a holder from a snapshot; harmless when it does not hold it."""

    def delete_snapshot(self, content_hash: str) -> None:
        """Forget a snapshot that nothing holds; its rows stay until they are pruned."""

    def create_check(self, request: CheckRequest) -> Job:
        """Start judging stored rows again, all batches and runs together."""

    def get_check_report(self, job_id: str) -> QualityReport:
        """Return the result of a finished check."""

    def backup(self) -> Iterator[bytes]:
        """Yield a copy of the catalog as it is now, in pieces; recording goes on meanwhile."""

    def prune(self, request: PruneRequest) -> PruneReport:
        """Delete old runs, but none that a snapshot needs."""

    def compact(self) -> CompactReport:
        """Write the catalog's files anew without the room that deleted rows left."""


class ProfilerPort(JobsPort, Protocol):
    """Times operators on the device of its own machine and records them in the catalog."""

    def list_local_devices(self) -> tuple[str, ...]:
        """Return the names of the devices present here."""

    def outline_profile(self, request: ProfileRequest) -> ProfileOutline:
        """Return what a profile would time and for how long, without timing anything."""

    def create_profile(self, request: ProfileRequest) -> Job:
        """Start a profiling job."""

    def get_profile_report(self, job_id: str) -> ProfileReport:
        """Return the result of a finished profiling job."""

    def create_graph_profile(self, request: GraphRequest) -> Job:
        """Start tracing a model and timing the nodes of its graph."""

    def get_graph_report(self, job_id: str) -> GraphReport:
        """Return the result of a finished profile of a graph."""

    def create_closure(self, request: ClosureRequest) -> Job:
        """Start timing whole steps of a model, to hold predictions to."""

    def get_closure_report(self, job_id: str) -> ClosureReport:
        """Return the result of finished closure measurements."""


class PredictorPort(JobsPort, Protocol):
    """Latency of operators, measured where possible, modelled elsewhere."""

    def create_training(self, request: TrainRequest) -> Job:
        """Start training on the catalog's present content; the result becomes active."""

    def get_training_report(self, job_id: str) -> PredictorTrainingReport:
        """Return the result of a finished training job."""

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return estimates for every row of every table, in one go."""

    def tabulate(self, query: SurfaceQuery) -> LatencySurface:
        """Return estimates of one operator over a grid of its dimensions."""

    def explain(self, query: LatencyQuery) -> Explanation:
        """Return why the estimate of a single call is what it is."""

    def plan_profile(self, request: PlanRequest) -> ProfilePlan:
        """Return which points to profile next, the most useful for its cost first."""

    def list_models(self) -> tuple[ModelVersion, ...]:
        """Return the stored model versions, newest first."""

    def activate_model(self, version: str) -> ModelVersion:
        """Make a stored version the one that answers."""

    def create_correction(self, request: CorrectionRequest) -> Correction:
        """Learn a correction from observations, and keep it under its name."""

    def list_corrections(self) -> tuple[Correction, ...]:
        """Return the corrections, newest first."""


class SimulatorPort(JobsPort, Protocol):
    """Evaluates whole deployments and training configurations."""

    def resume_job(self, job_id: str) -> Job:
        """Start a job that was cancelled or failed once more, and return the new one.

        It has what that one had done; one that still runs or has succeeded is returned as it is.

        Raises:
            InvalidRequestError: what the job was asked is not kept.

        """

    def list_definitions(self, kind: str) -> tuple[Definition, ...]:
        """Return the names of a kind that requests can use: models, devices, engines and others."""

    def create_serving_simulation(self, scenario: ServingScenario) -> Job:
        """Start simulating a serving deployment."""

    def get_serving_report(self, job_id: str) -> ServingReport:
        """Return the result of a finished serving simulation."""

    def read_serving_table(self, job_id: str, table: str) -> ArrowStream:
        """Return a table of a finished serving simulation: `requests`, `steps` or `series`."""

    def create_training_simulation(self, scenario: TrainingScenario) -> Job:
        """Start simulating a training step."""

    def get_training_report(self, job_id: str) -> TrainingReport:
        """Return the result of a finished training simulation."""

    def read_training_table(self, job_id: str, table: str) -> ArrowStream:
        """Return a table of a finished training simulation: `spans` or `memory`."""

    def create_capacity_search(self, request: CapacityRequest) -> Job:
        """Start looking for the highest rate at which a deployment meets targets."""

    def get_capacity_report(self, job_id: str) -> CapacityReport:
        """Return the result of a finished capacity search."""

    def create_serving_search(self, request: ServingSearchRequest) -> Job:
        """Start looking for the best deployments of a space.

        Raises:
            SearchTooLargeError: the space has more points than the service takes.

        """

    def get_serving_search_report(self, job_id: str) -> ServingSearchReport:
        """Return the result of a finished serving search."""

    def read_serving_search_table(self, job_id: str, table: str) -> ArrowStream:
        """Return a table of a finished serving search: `candidates`."""

    def watch_serving_search(self, job_id: str, first: int = 0) -> Watch[Finalist]:
        """Yield what the search has simulated, from the `first` on, until it ends.

        Whoever was cut off goes on with the number of those it has.
        """

    def plan_training_memory(self, scenario: TrainingScenario) -> TrainingMemoryReport:
        """Return what a strategy must hold on every stage, without asking for any time."""

    def plan_training_run(self, request: TrainingRunRequest) -> TrainingRunReport:
        """Return what a whole run takes: days, money and energy, failures included."""

    def create_training_search(self, request: TrainingSearchRequest) -> Job:
        """Start looking for the best strategies of a space.

        Raises:
            SearchTooLargeError: the space has more points than the service takes.

        """

    def get_training_search_report(self, job_id: str) -> TrainingSearchReport:
        """Return the result of a finished training search."""

    def read_training_search_table(self, job_id: str, table: str) -> ArrowStream:
        """Return a table of a finished training search: `candidates`."""

    def watch_training_search(self, job_id: str, first: int = 0) -> Watch[StrategyFinalist]:
        """Yield what the search has simulated, from the `first` on, until it ends."""
