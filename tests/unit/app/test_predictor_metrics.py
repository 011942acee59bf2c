"""What operators can watch of a predictor."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from foretoken.app.service_metrics import ObservedPredictor, PredictorMetrics
from foretoken.client.predictor import PredictorClient
from foretoken.domain.measurements.estimate import DType, LatencyColumns, OperatorTable, Provenance
from foretoken.predictor.drift import DriftEntry, DriftReport
from foretoken.predictor.statistics import PredictionStatistics


@dataclass
class _Drift:
    report: DriftReport


@dataclass
class _Predictor:
    statistics: PredictionStatistics = field(default_factory=PredictionStatistics)
    drift: _Drift | None = None


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
    predictor.statistics.observe_model("v7")
    predictor.statistics.observe_failed_model_load()
    for is_hit in (True, True, False):
        predictor.statistics.observe_cache(is_hit=is_hit)
    predictor.statistics.observe_refusal("gemm")
    assert (1.0, 1.0) == (sample("models_active"), sample("model_info", version="v7"))
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
