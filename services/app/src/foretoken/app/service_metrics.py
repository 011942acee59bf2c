"""Prometheus metrics of services that run in this process, read when they are scraped."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

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

_CATALOG = "foretoken_catalog"
_PREDICTOR = "foretoken_predictor"
_SIMULATOR = "foretoken_simulator"
# Kinds that are reported before there is a job of them.
_KINDS = ("serving", "training", "capacity", "serving-search")
_SEARCHES = ("capacity", "serving-search")


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
        yield GaugeMetricFamily(
            f"{_CATALOG}_users", "Reads and writes under way", value=self._catalog.num_readers
        )
        yield GaugeMetricFamily(
            f"{_CATALOG}_storage_bytes", "Size of the catalog", value=self._catalog.size_bytes()
        )

    def _collect_ingest(self) -> Iterator[Metric]:
        ingest = self._catalog.statistics()
        counts = (
            ("rows", "New rows on disk", ingest.num_rows),
            ("ingest_bytes", "Arrow data of new rows", ingest.num_bytes),
            ("batches", "New batches on disk", ingest.num_batches),
            ("duplicate_batches", "Batches that were there already", ingest.num_duplicates),
            ("ingest_seconds", "Time from arrival to receipt", ingest.ingest_s),
        )
        for name, meaning, value in counts:
            yield CounterMetricFamily(f"{_CATALOG}_{name}", meaning, value=value)
        rejects = CounterMetricFamily(
            f"{_CATALOG}_rejects", "Batches that were refused", labels=("reason",)
        )
        for reason, count in ingest.rejects.items():
            rejects.add_metric((reason,), count)
        yield rejects

    def _collect_sql(self) -> Iterator[Metric]:
        sql = self._catalog.sql_statistics()
        yield CounterMetricFamily(
            f"{_CATALOG}_sql_queries", "SQL queries asked", value=sql.num_asked
        )
        yield GaugeMetricFamily(
            f"{_CATALOG}_sql_queries_running", "SQL queries under way", value=sql.num_running
        )
        limits = CounterMetricFamily(
            f"{_CATALOG}_sql_limits", "SQL queries that a limit ended", labels=("limit",)
        )
        for limit, count in sql.limits_hit.items():
            limits.add_metric((limit,), count)
        yield limits


@runtime_checkable
class ObservedPredictor(Protocol):
    """A predictor that counts what it answers: one of this process, not a remote one."""

    @property
    def statistics(self) -> PredictionStatistics:
        """What was answered."""

    @property
    def drift(self) -> DriftWatch | None:
        """What new measurements say of the model; None where they are not compared."""


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
        yield from _collect_model(found)
        if self._predictor.drift is not None:
            yield from _collect_drift(self._predictor.drift)


def _collect_estimates(found: StatisticsSnapshot) -> Iterator[Metric]:
    ground = ("operator", "provenance")
    estimates = CounterMetricFamily(f"{_PREDICTOR}_estimates", "Rows answered", labels=ground)
    width = HistogramMetricFamily(
        f"{_PREDICTOR}_interval_ratio", "Upper over lower bound of an estimate", labels=ground
    )
    distance = HistogramMetricFamily(
        f"{_PREDICTOR}_nearest_octaves", "Distance to the nearest measured point", labels=ground
    )
    seconds = HistogramMetricFamily(
        f"{_PREDICTOR}_predict_seconds", "Time to answer a table of calls", labels=("operator",)
    )
    for operator, answered in found.operators.items():
        add_histogram(seconds, (operator,), answered.seconds)
        for provenance, part in answered.provenances.items():
            labels = (operator, provenance.name.lower())
            estimates.add_metric(labels, part.num_estimates)
            add_histogram(width, labels, part.interval_ratio)
            add_histogram(distance, labels, part.nearest_octaves)
    yield from (estimates, width, distance, seconds)


def _collect_counts(found: StatisticsSnapshot) -> Iterator[Metric]:
    refusals = CounterMetricFamily(
        f"{_PREDICTOR}_refusals", "Tables refused as out of coverage", labels=("operator",)
    )
    for operator, count in found.num_refusals.items():
        refusals.add_metric((operator,), count)
    yield refusals
    counts = (
        ("cache_hits", "Tables answered from memory", found.num_cache_hits),
        ("cache_misses", "Tables that had to be computed", found.num_cache_misses),
        ("model_loads", "Models that began to answer", found.num_model_loads),
        ("model_load_failures", "Models that could not be loaded", found.num_failed_model_loads),
    )
    for name, meaning, value in counts:
        yield CounterMetricFamily(f"{_PREDICTOR}_{name}", meaning, value=value)


def _collect_model(found: StatisticsSnapshot) -> Iterator[Metric]:
    is_active = bool(found.model_version)
    yield GaugeMetricFamily(
        f"{_PREDICTOR}_models_active", "1 while a trained model answers, else 0", value=is_active
    )
    info = GaugeMetricFamily(
        f"{_PREDICTOR}_model_info", "1 for the version that answers", labels=("version",)
    )
    if is_active:
        info.add_metric((found.model_version,), 1)
    yield info


def _collect_drift(drift: DriftWatch) -> Iterator[Metric]:
    report = drift.report
    gauges = (
        ("rows", "Measurements since the training that were compared", "num_rows"),
        ("error_ratio", "Median of |measured / estimated - 1|", "error_ratio_median"),
        ("error_ratio_p90", "90th percentile of |measured / estimated - 1|", "error_ratio_p90"),
        ("bias_ratio", "Median of measured / estimated - 1", "bias_ratio_median"),
        ("inside_ratio", "Share of measurements inside the 90 % intervals", "inside_ratio"),
    )
    for name, meaning, field in gauges:
        gauge = GaugeMetricFamily(
            f"{_PREDICTOR}_drift_{name}", meaning, labels=("operator", "device")
        )
        for entry in report.entries:
            gauge.add_metric((entry.operator, entry.device), getattr(entry, field))
        yield gauge
    totals = (
        ("left_out_rows", "Measurements since the training not compared yet", report.num_left_out),
        ("flagged_rows", "Measurements in new runs that are flagged", report.num_flagged),
    )
    for name, meaning, value in totals:
        yield GaugeMetricFamily(f"{_PREDICTOR}_drift_{name}", meaning, value=value)


class ObservedSimulator(Protocol):
    """A simulator that counts what it does: one of this process, not a remote one."""

    @property
    def statistics(self) -> SimulatorStatistics:
        """What was simulated and searched."""

    @property
    def workers(self) -> WorkerCounts:
        """The workers of searches."""

    @property
    def max_queued_jobs(self) -> int:
        """Jobs that may wait."""

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
        jobs = self._simulator.list_jobs()
        yield from _collect_jobs(jobs)
        yield GaugeMetricFamily(
            f"{_SIMULATOR}_queue_limit", "Jobs that may wait", value=self._simulator.max_queued_jobs
        )
        yield from self._collect_work()
        workers = self._simulator.workers
        yield GaugeMetricFamily(
            f"{_SIMULATOR}_workers", "Workers of searches that are there", value=workers.num_alive
        )
        yield CounterMetricFamily(
            f"{_SIMULATOR}_worker_restarts",
            "Workers that were started for one that died",
            value=workers.num_restarts,
        )

    def _collect_work(self) -> Iterator[Metric]:
        found = self._simulator.statistics.read()
        counts = (
            ("points_evaluated", "Points answered in closed form", found.num_evaluated),
            ("points_simulated", "Tasks of searches that workers simulated", found.num_simulated),
            ("journal_hits", "Results of searches not computed again", found.num_kept),
        )
        for name, meaning, value in counts:
            yield CounterMetricFamily(f"{_SIMULATOR}_{name}", meaning, value=value)
        seconds = HistogramMetricFamily(
            f"{_SIMULATOR}_simulation_seconds", "Time of a simulation", labels=("within",)
        )
        add_histogram(seconds, ("job",), found.simulation_s)
        add_histogram(seconds, ("search",), found.search_task_s)
        yield seconds


def _collect_jobs(jobs: tuple[Job, ...]) -> Iterator[Metric]:
    counts = Counter((job.kind, job.state) for job in jobs)
    gauge = GaugeMetricFamily(f"{_SIMULATOR}_jobs", "Jobs that are kept", labels=("kind", "state"))
    for kind in dict.fromkeys((*_KINDS, *(job.kind for job in jobs))):
        for state in JobState:
            gauge.add_metric((kind, state.name.lower()), counts[kind, state])
    yield gauge
    num_queued = sum(job.state is JobState.QUEUED for job in jobs)
    yield GaugeMetricFamily(f"{_SIMULATOR}_queue_length", "Jobs that wait", value=num_queued)
    num_running = sum(counts[kind, JobState.RUNNING] for kind in _SEARCHES)
    yield GaugeMetricFamily(
        f"{_SIMULATOR}_searches_running", "Searches under way", value=num_running
    )
