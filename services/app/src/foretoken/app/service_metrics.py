"""Prometheus metrics of services that run in this process, read when they are scraped."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from foretoken.app.telemetry.metric_table import COUNTER, GAUGE, HISTOGRAM, find_metric
from foretoken.domain.job import Job, JobState

if TYPE_CHECKING:
    from foretoken.catalog.service import CatalogService
    from foretoken.jobs.executor import WorkerCounts
    from foretoken.predictor.drift import DriftWatch
    from foretoken.predictor.statistics import (
        PredictionStatistics,
        StatisticsSnapshot,
    )
    from foretoken.simulator.statistics import SimulatorStatistics

_FAMILIES = {
    COUNTER: CounterMetricFamily,
    GAUGE: GaugeMetricFamily,
    HISTOGRAM: HistogramMetricFamily,
}
# Kinds that are reported before there is a job of them.
_KINDS: Mapping[str, tuple[str, ...]] = {
    "catalog": ("check",),
    "predictor": ("train",),
    "simulator": ("serving", "training", "capacity", "serving-search"),
    "profiler": ("profile",),
}
_SEARCHES = ("capacity", "serving-search")


def _family(service: str, name: str) -> Any:
    """Return the family of a metric, without values."""
    found = find_metric(service, name)
    return _FAMILIES[found.kind](found.full_name(service), found.meaning, labels=found.labels)


def _values(service: str, values: Mapping[str, float]) -> Iterator[Metric]:
    """Yield metrics without labels."""
    for name, value in values.items():
        family = _family(service, name)
        family.add_metric((), value)
        yield family


def _labelled(
    service: str, name: str, values: Iterable[tuple[tuple[str, ...], float]]
) -> Iterator[Metric]:
    """Yield a metric by the values of its labels."""
    family = _family(service, name)
    for labels, value in values:
        family.add_metric(labels, value)
    yield family


class CountedHistogram(Protocol):
    """Counts of each bucket by itself, the last of them above the last bound, and the sum."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds of buckets."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Values in each."""

    @property
    def total(self) -> float:
        """The sum of all values."""


def add_histogram(
    family: HistogramMetricFamily, labels: tuple[str, ...], histogram: CountedHistogram
) -> None:
    """Add the counts of one set of labels to a family."""
    bounds = (*map(str, histogram.bounds), "+Inf")
    buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
    family.add_metric(labels, buckets, histogram.total)


class CatalogMetrics(Collector):
    """What was recorded, refused and asked since the catalog was opened, and what it takes now."""

    def __init__(self, catalog: CatalogService) -> None:
        self._catalog = catalog

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: registering must not open the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they stand."""
        yield from self._collect_ingest()
        yield from self._collect_sql()
        disk = self._catalog.disk_usage()
        yield from _values(
            "catalog",
            {
                "users": self._catalog.num_readers,
                "storage_bytes": self._catalog.size_bytes(),
                "disk_free_bytes": disk.free,
                "disk_bytes": disk.total,
            },
        )
        if (backup_s := self._catalog.last_backup_s()) is not None:
            yield from _values("catalog", {"backup_timestamp_seconds": backup_s})

    def _collect_ingest(self) -> Iterator[Metric]:
        ingest = self._catalog.statistics()
        counts = {
            "rows": ingest.num_rows,
            "ingest_bytes": ingest.num_bytes,
            "batches": ingest.num_batches,
            "duplicate_batches": ingest.num_duplicates,
            "ingest_seconds": ingest.ingest_s,
        }
        yield from _values("catalog", counts)
        rejects = (((reason,), count) for reason, count in ingest.rejects.items())
        yield from _labelled("catalog", "rejects", rejects)

    def _collect_sql(self) -> Iterator[Metric]:
        sql = self._catalog.sql_statistics()
        counts = {"sql_queries": sql.num_asked, "sql_queries_running": sql.num_running}
        yield from _values("catalog", counts)
        limits = (((limit,), count) for limit, count in sql.limits_hit.items())
        yield from _labelled("catalog", "sql_limits", limits)


@runtime_checkable
class ObservedPredictor(Protocol):
    """A predictor that counts what it answers: one of this process, not a remote one."""

    @property
    def statistics(self) -> PredictionStatistics:
        """What was answered."""

    @property
    def drift(self) -> DriftWatch | None:
        """What new measurements say of the model; None where they are not compared."""

    def model_snapshot_s(self) -> float:
        """From when the active model's measurements are, in s since 1970; 0: there is none."""


class PredictorMetrics(Collector):
    """What was answered since the predictor was opened, by which model, and how far it is off."""

    def __init__(self, predictor: ObservedPredictor) -> None:
        self._predictor = predictor

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the values are the predictor's, which may not be open yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they stand."""
        found = self._predictor.statistics.read()
        yield from _collect_estimates(found)
        yield from _collect_counts(found)
        yield from _collect_model(found, self._predictor.model_snapshot_s())
        if self._predictor.drift is not None:
            yield from _collect_drift(self._predictor.drift)


def _collect_estimates(found: StatisticsSnapshot) -> Iterator[Metric]:
    names = ("estimates", "interval_ratio", "nearest_octaves", "predict_seconds")
    families = [_family("predictor", name) for name in names]
    estimates, width, distance, seconds = families
    for operator, answered in found.operators.items():
        add_histogram(seconds, (operator,), answered.seconds)
        for provenance, part in answered.provenances.items():
            labels = (operator, provenance.name.lower())
            estimates.add_metric(labels, part.num_estimates)
            add_histogram(width, labels, part.interval_ratio)
            add_histogram(distance, labels, part.nearest_octaves)
    yield from families


def _collect_counts(found: StatisticsSnapshot) -> Iterator[Metric]:
    refusals = (((operator,), count) for operator, count in found.num_refusals.items())
    yield from _labelled("predictor", "refusals", refusals)
    counts = {
        "cache_hits": found.num_cache_hits,
        "cache_misses": found.num_cache_misses,
        "model_loads": found.num_model_loads,
        "model_load_failures": found.num_failed_model_loads,
    }
    yield from _values("predictor", counts)


def _collect_model(found: StatisticsSnapshot, snapshot_s: float) -> Iterator[Metric]:
    version = found.model_version
    facts = {"models_active": bool(version), "model_snapshot_timestamp_seconds": snapshot_s}
    yield from _values("predictor", facts)
    versions = [((version,), 1.0)] if version else []
    yield from _labelled("predictor", "model_info", versions)


def _collect_drift(drift: DriftWatch) -> Iterator[Metric]:
    report = drift.report
    fields = {
        "rows": "num_rows",
        "error_ratio": "error_ratio_median",
        "error_ratio_p90": "error_ratio_p90",
        "bias_ratio": "bias_ratio_median",
        "inside_ratio": "inside_ratio",
    }
    for name, field in fields.items():
        values = (
            ((entry.operator, entry.device), float(getattr(entry, field)))
            for entry in report.entries
        )
        yield from _labelled("predictor", f"drift_{name}", values)
    totals = {"left_out_rows": report.num_left_out, "flagged_rows": report.num_flagged}
    yield from _values("predictor", {f"drift_{name}": n for name, n in totals.items()})


class ObservedSimulator(Protocol):
    """A simulator that counts what it does: one of this process, not a remote one."""

    @property
    def statistics(self) -> SimulatorStatistics:
        """What was simulated and searched."""

    @property
    def workers(self) -> WorkerCounts:
        """The workers of searches."""

    def list_jobs(self) -> tuple[Job, ...]:
        """Return all jobs."""


class SimulatorMetrics(Collector):
    """The jobs that are there, what was simulated since the simulator was opened, and by whom."""

    def __init__(self, simulator: ObservedSimulator) -> None:
        self._simulator = simulator

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: registering must not open the simulator."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they stand."""
        found, workers = self._simulator.statistics.read(), self._simulator.workers
        jobs = self._simulator.list_jobs()
        values = {
            "searches_running": sum(
                job.kind in _SEARCHES and job.state is JobState.RUNNING for job in jobs
            ),
            "points_evaluated": found.num_evaluated,
            "points_simulated": found.num_simulated,
            "journal_hits": found.num_kept,
            "workers": workers.num_alive,
            "worker_restarts": workers.num_restarts,
        }
        yield from _values("simulator", values)
        seconds = _family("simulator", "simulation_seconds")
        add_histogram(seconds, ("job",), found.simulation_s)
        add_histogram(seconds, ("search",), found.search_task_s)
        yield seconds


class ObservedJobs(Protocol):
    """A service of this process whose jobs are counted."""

    @property
    def max_queued_jobs(self) -> int:
        """Jobs that may wait."""

    def list_jobs(self) -> tuple[Job, ...]:
        """Return all jobs."""


class JobMetrics(Collector):
    """The jobs that a service keeps, and how many may wait."""

    def __init__(self, service: str, jobs: ObservedJobs) -> None:
        self._service = service
        self._jobs = jobs

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: registering must not open the service."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they stand."""
        jobs = self._jobs.list_jobs()
        counts = Counter((job.kind, job.state) for job in jobs)
        kinds = dict.fromkeys((*_KINDS[self._service], *(job.kind for job in jobs)))
        by_state = (
            ((kind, state.name.lower()), float(counts[kind, state]))
            for kind in kinds
            for state in JobState
        )
        yield from _labelled(self._service, "jobs", by_state)
        queue = {
            "queue_length": sum(job.state is JobState.QUEUED for job in jobs),
            "queue_limit": self._jobs.max_queued_jobs,
        }
        yield from _values(self._service, queue)


class LaneMetrics(Collector):
    """How full the threads of methods are, and the queues before them."""

    def __init__(self, lanes: Callable[[], Mapping[str, ObservedLane]]) -> None:
        """Keep what returns the lanes that there are, by `SERVICE/METHOD`."""
        self._lanes = lanes

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: methods have lanes when they are first called."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they stand."""
        by_service: dict[str, dict[str, ObservedLane]] = {}
        for name, lane in self._lanes().items():
            service, _, method = name.partition("/")
            by_service.setdefault(service, {})[method] = lane
        for service, lanes in by_service.items():
            for name, read in _LANES.items():
                values = (((method,), float(read(lane))) for method, lane in lanes.items())
                yield from _labelled(service, name, values)


class ObservedLane(Protocol):
    """The threads of one method."""

    num_threads: int
    max_queued: int

    @property
    def num_calls(self) -> int:
        """Calls that run or wait."""


_LANES: Mapping[str, Callable[[ObservedLane], int]] = {
    "requests_limit": lambda lane: lane.num_threads,
    "requests_waiting": lambda lane: max(0, lane.num_calls - lane.num_threads),
    "requests_waiting_limit": lambda lane: lane.max_queued,
}
