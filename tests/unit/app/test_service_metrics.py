"""Metrics of services that run in this process."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.app.request_metrics import RequestMetrics
from foretoken.app.service_metrics import (
    CatalogMetrics,
    JobMetrics,
    LaneMetrics,
    ObservedPredictor,
    PredictorMetrics,
    SimulatorMetrics,
)
from foretoken.app.telemetry.metric_table import metrics_of
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.upkeep.room import BackupNote
from foretoken.client.services import PredictorClient
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.job import Job, JobState
from foretoken.domain.measurements.estimate import DType, LatencyColumns, OperatorTable, Provenance
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind, SqlQuery
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.jobs.executor import WorkerCounts
from foretoken.predictor.drift import DriftEntry, DriftReport
from foretoken.predictor.statistics import PredictionStatistics
from foretoken.simulator.service import SimulatorService
from foretoken.simulator.statistics import SimulatorStatistics
from foretoken.wire.arrow import read_table, rows_to_table


@pytest.fixture
def catalog(catalog_path: str) -> Iterator[CatalogService]:
    service = CatalogService(CatalogConfig(path=catalog_path, num_threads=1))
    service.open()
    yield service
    service.close()


def _batch(index: int, device: str = "a30") -> MeasurementBatch:
    row = {
        "operator": "gemm",
        "phase": "forward",
        "dtype": "bf16",
        "dims": {"m": 64, "n": 4096, "k": 4096},
        "device": device,
        "latency_us_median": 100.0,
        "status": "ok",
    }
    return MeasurementBatch(batch_index=index, rows=rows_to_table([row]))


def test_metrics_count_what_happened(catalog: CatalogService) -> None:
    run = Run(run_id="run-1", kind=RunKind.PROFILE, tool="test")
    list(catalog.record(run, [_batch(0), _batch(1)]))
    list(catalog.record(run, [_batch(1)]))
    with pytest.raises(InvalidRequestError):
        list(catalog.record(run, [_batch(-1)]))
    read_table(catalog.query_sql(SqlQuery(text="SELECT 1")))
    registry = CollectorRegistry()
    registry.register(CatalogMetrics(catalog))
    found = {
        name: registry.get_sample_value(f"foretoken_catalog_{name}")
        for name in ("rows_total", "batches_total", "duplicate_batches_total", "sql_queries_total")
    }
    assert found == {
        "rows_total": 2.0,
        "batches_total": 2.0,
        "duplicate_batches_total": 1.0,
        "sql_queries_total": 1.0,
    }
    reason = {"reason": "INVALID_REQUEST"}
    assert registry.get_sample_value("foretoken_catalog_rejects_total", reason) == 1.0
    assert registry.get_sample_value("foretoken_catalog_users") == 0.0
    size = registry.get_sample_value("foretoken_catalog_storage_bytes")
    assert size == float(catalog.size_bytes()) > 0
    assert b"foretoken_catalog_ingest_seconds_total" in generate_latest(registry)


def test_room_and_the_age_of_the_backup_are_told(catalog: CatalogService) -> None:
    """A backup counts when it was read to its end, also in the next process."""

    def sample(name: str) -> float:
        registry = CollectorRegistry()
        registry.register(CatalogMetrics(catalog))
        value = registry.get_sample_value(f"foretoken_catalog_{name}")
        assert value is not None
        return value

    assert 0 < sample("disk_free_bytes") <= sample("disk_bytes")
    next(catalog.backup())
    assert 0.0 == sample("backup_timestamp_seconds")
    begun_s = time.time()
    assert sum(map(len, catalog.backup())) > 0
    noted_s = sample("backup_timestamp_seconds")
    assert begun_s <= noted_s <= time.time()
    catalog.close()
    catalog.open()
    assert noted_s == sample("backup_timestamp_seconds")


def test_a_note_that_is_none_is_no_backup(tmp_path: Path) -> None:
    (tmp_path / "last_backup").write_text("soon")
    assert 0.0 == BackupNote(tmp_path).last_s()
    (tmp_path / "file").write_text("")
    # No folder can be there; the backup has ended all the same.
    BackupNote(tmp_path / "file" / "folder").note(datetime.now(UTC))


@dataclass
class _Lane:
    num_threads: int = 2
    max_queued: int = 8
    num_calls: int = 5


def test_threads_and_the_queues_before_them_are_told() -> None:
    registry = CollectorRegistry()
    lanes = {"catalog/Record": _Lane(max_queued=0, num_calls=1), "web/list_runs": _Lane()}
    registry.register(LaneMetrics(lambda: lanes))
    names = ("requests_limit", "requests_waiting", "requests_waiting_limit")
    found = [
        [registry.get_sample_value(f"foretoken_{service}_{name}", {"method": m}) for name in names]
        for service, m in (("catalog", "Record"), ("web", "list_runs"))
    ]
    assert [[2.0, 0.0, 0.0], [2.0, 3.0, 8.0]] == found


def test_every_metric_of_the_table_is_served_and_no_other(catalog: CatalogService) -> None:
    predictor = _Predictor(drift=_Drift(DriftReport()))
    collectors: dict[str, list[Collector]] = {
        "catalog": [CatalogMetrics(catalog)],
        "predictor": [PredictorMetrics(predictor)],
        "simulator": [SimulatorMetrics(_Simulator())],
        "profiler": [],
        "web": [],
    }
    for service, own in collectors.items():
        registry = CollectorRegistry()
        requests = RequestMetrics(registry)
        own.append(LaneMetrics(lambda service=service: {f"{service}/M": _Lane()}))  # type: ignore[misc]
        if service == "web":
            requests.of_web()
        else:
            requests.count_refused(f"/foretoken.api.{service}.v1.Service/M")
            own.append(JobMetrics(service, _Simulator()))
        for one in own:
            registry.register(one)
        served = {(family.name, family.type, family.documentation) for family in registry.collect()}
        assert served == {
            (one.full_name(service), one.kind, one.meaning) for one in metrics_of(service)
        }


@dataclass
class _Drift:
    report: DriftReport


@dataclass
class _Predictor:
    statistics: PredictionStatistics = field(default_factory=PredictionStatistics)
    drift: _Drift | None = None
    snapshot_s: float = 0.0

    def model_snapshot_s(self) -> float:
        return self.snapshot_s


def _registry(predictor: _Predictor) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(PredictorMetrics(predictor))
    return registry


def _answer() -> LatencyColumns:
    """Return two interpolated estimates, within 10 % and within a factor of 2."""
    return LatencyColumns(
        latency_us=np.array([10.0, 10.0]),
        low_us=np.array([10.0, 10.0]),
        high_us=np.array([11.0, 20.0]),
        provenance=np.full(2, Provenance.INTERPOLATED.value),
        nearest_octaves=np.array([0.25, 3.0]),
    )


@pytest.fixture
def predictor() -> _Predictor:
    found = _Predictor()
    table = OperatorTable(operator="gemm", dtype=DType.BF16, columns={})
    found.statistics.observe(table, _answer(), 0.002)
    return found


def test_estimates_are_histograms_by_operator_and_provenance(predictor: _Predictor) -> None:
    registry = _registry(predictor)
    ground = {"operator": "gemm", "provenance": "interpolated"}

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"foretoken_predictor_{name}", ground | labels)

    assert 2.0 == sample("estimates_total")
    assert [0.0, 1.0, 2.0, 2.0] == [
        sample("interval_ratio_bucket", le=bound) for bound in ("1.05", "1.1", "2.0", "+Inf")
    ]
    assert (2.0, pytest.approx(3.1)) == (
        sample("interval_ratio_count"),
        sample("interval_ratio_sum"),
    )
    assert [0.0, 1.0, 2.0] == [
        sample("nearest_octaves_bucket", le=bound) for bound in ("0.125", "0.25", "4.0")
    ]


def test_seconds_are_a_histogram_by_operator(predictor: _Predictor) -> None:
    registry = _registry(predictor)
    name = "foretoken_predictor_predict_seconds"
    buckets = [
        registry.get_sample_value(f"{name}_bucket", {"operator": "gemm", "le": bound})
        for bound in ("0.001", "0.0025", "+Inf")
    ]
    assert [0.0, 1.0, 1.0] == buckets
    assert 0.002 == registry.get_sample_value(f"{name}_sum", {"operator": "gemm"})


def test_the_model_the_cache_and_refusals_are_told(predictor: _Predictor) -> None:
    registry = _registry(predictor)

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"foretoken_predictor_{name}", labels)

    assert 0.0 == sample("models_active")
    assert 0.0 == sample("model_snapshot_timestamp_seconds")
    predictor.statistics.observe_model("v7")
    predictor.snapshot_s = 1_700_000_000.0
    predictor.statistics.observe_failed_model_load()
    for is_hit in (True, True, False):
        predictor.statistics.observe_cache(is_hit=is_hit)
    predictor.statistics.observe_refusal("gemm")
    assert (1.0, 1.0) == (sample("models_active"), sample("model_info", version="v7"))
    assert 1_700_000_000.0 == sample("model_snapshot_timestamp_seconds")
    assert (1.0, 1.0) == (sample("model_loads_total"), sample("model_load_failures_total"))
    assert (2.0, 1.0) == (sample("cache_hits_total"), sample("cache_misses_total"))
    assert 1.0 == sample("refusals_total", operator="gemm")


def test_drift_is_told_by_operator_and_device(predictor: _Predictor) -> None:
    entry = DriftEntry(
        operator="gemm",
        device="a30",
        num_rows=8,
        error_ratio_median=0.2,
        error_ratio_p90=0.4,
        bias_ratio_median=-0.1,
        inside_ratio=0.75,
    )
    report = DriftReport(model_version="v7", entries=(entry,), num_left_out=5, num_flagged=3)
    predictor.drift = _Drift(report)
    registry = _registry(predictor)
    names = ("rows", "error_ratio", "error_ratio_p90", "bias_ratio", "inside_ratio")
    labels = {"operator": "gemm", "device": "a30"}
    found = [
        registry.get_sample_value(f"foretoken_predictor_drift_{name}", labels) for name in names
    ]
    assert [8.0, 0.2, 0.4, -0.1, 0.75] == found
    assert 5.0 == registry.get_sample_value("foretoken_predictor_drift_left_out_rows")
    assert 3.0 == registry.get_sample_value("foretoken_predictor_drift_flagged_rows")


def test_without_a_comparison_there_is_no_drift(predictor: _Predictor) -> None:
    assert b"drift" not in generate_latest(_registry(predictor))


def test_a_remote_predictor_is_not_observed(predictor: _Predictor) -> None:
    with PredictorClient.connect("localhost:1") as remote:
        found = [isinstance(one, ObservedPredictor) for one in (predictor, remote)]
    assert [True, False] == found


@dataclass
class _Simulator:
    """A simulator as its metrics see it."""

    jobs: tuple[Job, ...] = ()
    statistics: SimulatorStatistics = field(default_factory=SimulatorStatistics)
    workers: WorkerCounts = field(default_factory=WorkerCounts)
    max_queued_jobs: int = 64

    def list_jobs(self) -> tuple[Job, ...]:
        return self.jobs


def _simulator_registry(simulator: _Simulator) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(SimulatorMetrics(simulator))
    registry.register(JobMetrics("simulator", simulator))
    return registry


def _job(kind: str, state: JobState) -> Job:
    return Job(job_id="job", kind=kind, state=state)


def _sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"foretoken_simulator_{name}", labels)


def test_jobs_are_counted_by_kind_and_state() -> None:
    """Searches under way are those of both kinds; whoever waits is in the queue."""
    jobs = (
        _job("serving", JobState.QUEUED),
        _job("serving-search", JobState.QUEUED),
        _job("serving-search", JobState.RUNNING),
        _job("capacity", JobState.RUNNING),
        _job("serving", JobState.RUNNING),
        _job("capacity", JobState.FAILED),
    )
    registry = _simulator_registry(_Simulator(jobs=jobs))
    assert _sample(registry, "jobs", kind="capacity", state="failed") == 1.0
    assert _sample(registry, "jobs", kind="serving", state="queued") == 1.0
    assert _sample(registry, "jobs", kind="training", state="running") == 0.0
    assert _sample(registry, "searches_running") == 2.0
    assert (_sample(registry, "queue_length"), _sample(registry, "queue_limit")) == (2.0, 64.0)


def test_work_is_counted() -> None:
    """Points, tasks, what was kept, and the time of each."""
    simulator = _Simulator(workers=WorkerCounts(num_alive=2, num_restarts=1))
    simulator.statistics.observe_evaluated(1_000)
    simulator.statistics.observe_kept(3)
    for elapsed_s in (0.2, 0.3, 4000.0):
        simulator.statistics.observe_search_task(elapsed_s)
    simulator.statistics.observe_simulation(1.5)
    registry = _simulator_registry(simulator)
    names = ("points_evaluated_total", "points_simulated_total", "journal_hits_total")
    assert [_sample(registry, name) for name in names] == [1000.0, 3.0, 3.0]
    assert (_sample(registry, "workers"), _sample(registry, "worker_restarts_total")) == (2.0, 1.0)
    buckets = [
        _sample(registry, "simulation_seconds_bucket", within="search", le=bound)
        for bound in ("0.1", "0.25", "0.5", "1800.0", "+Inf")
    ]
    assert buckets == [0.0, 1.0, 2.0, 2.0, 3.0]
    assert _sample(registry, "simulation_seconds_sum", within="job") == pytest.approx(1.5)


def test_a_service_counts_what_it_does(tmp_path: Path) -> None:
    """The metrics of a running server's own simulator, one simulation after it has started."""
    composition = Composition(AppConfig(home=str(tmp_path)))
    try:
        simulator = composition.simulator
        assert isinstance(simulator, SimulatorService)
        workload = WorkloadSpec(num_requests=3, decode=LengthSpec(mean=2))
        scenario = ServingScenario(model=load_model("qwen2-7b"), device="a30", workload=workload)
        job = simulator.create_serving_simulation(scenario)
        assert list(simulator.watch_job(job.job_id))[-1].state is JobState.SUCCEEDED
        registry = CollectorRegistry()
        registry.register(SimulatorMetrics(simulator))
        registry.register(JobMetrics("simulator", simulator))
        assert _sample(registry, "jobs", kind="serving", state="succeeded") == 1.0
        assert _sample(registry, "simulation_seconds_count", within="job") == 1.0
        assert _sample(registry, "workers") == 0.0
        assert b"foretoken_simulator_points_evaluated_total 0.0" in generate_latest(registry)
    finally:
        composition.close()
