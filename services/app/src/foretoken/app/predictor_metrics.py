"""Prometheus metrics of a predictor that runs in this process, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from foretoken.app.histogram_metric import add_histogram

if TYPE_CHECKING:
    from foretoken.predictor.drift import DriftWatch
    from foretoken.predictor.statistics import (
        PredictionStatistics,
        StatisticsSnapshot,
    )

_PREFIX = "foretoken_predictor"


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
    estimates = CounterMetricFamily(f"{_PREFIX}_estimates", "Rows answered", labels=ground)
    width = HistogramMetricFamily(
        f"{_PREFIX}_interval_ratio", "Upper over lower bound of an estimate", labels=ground
    )
    distance = HistogramMetricFamily(
        f"{_PREFIX}_nearest_octaves", "Distance to the nearest measured point", labels=ground
    )
    seconds = HistogramMetricFamily(
        f"{_PREFIX}_predict_seconds", "Time to answer a table of calls", labels=("operator",)
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
        f"{_PREFIX}_refusals", "Tables refused as out of coverage", labels=("operator",)
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
        yield CounterMetricFamily(f"{_PREFIX}_{name}", meaning, value=value)


def _collect_model(found: StatisticsSnapshot) -> Iterator[Metric]:
    is_active = bool(found.model_version)
    yield GaugeMetricFamily(
        f"{_PREFIX}_models_active", "1 while a trained model answers, else 0", value=is_active
    )
    info = GaugeMetricFamily(
        f"{_PREFIX}_model_info", "1 for the version that answers", labels=("version",)
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
        gauge = GaugeMetricFamily(f"{_PREFIX}_drift_{name}", meaning, labels=("operator", "device"))
        for entry in report.entries:
            gauge.add_metric((entry.operator, entry.device), getattr(entry, field))
        yield gauge
    totals = (
        ("left_out_rows", "Measurements since the training not compared yet", report.num_left_out),
        ("flagged_rows", "Measurements in new runs that are flagged", report.num_flagged),
    )
    for name, meaning, value in totals:
        yield GaugeMetricFamily(f"{_PREFIX}_drift_{name}", meaning, value=value)
