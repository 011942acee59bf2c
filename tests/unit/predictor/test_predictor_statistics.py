"""What the predictor counts of its own answers."""

import math
import threading

import numpy as np

from foretoken.domain.measurements.estimate import DType, LatencyColumns, OperatorTable, Provenance
from foretoken.predictor.statistics import (
    INTERVAL_RATIO_BOUNDS,
    MAX_INTERVAL_RATIO,
    MAX_OCTAVES,
    NEAREST_OCTAVES_BOUNDS,
    Histogram,
    PredictionStatistics,
)

_MEASURED, _BEYOND = Provenance.MEASURED, Provenance.EXTRAPOLATED


def _table(operator: str = "gemm") -> OperatorTable:
    return OperatorTable(operator=operator, dtype=DType.BF16, columns={})


def _answer(
    provenances: list[Provenance], ratios: list[float], octaves: list[float] | None = None
) -> LatencyColumns:
    """Return estimates of 10 µs whose intervals begin there and are that wide."""
    low_us = np.full(len(ratios), 10.0)
    return LatencyColumns(
        latency_us=low_us,
        low_us=low_us,
        high_us=low_us * np.array(ratios),
        provenance=np.array([p.value for p in provenances], dtype=np.int64),
        nearest_octaves=np.array(octaves if octaves is not None else []),
    )


def _bucket(histogram: Histogram, bound: float) -> int:
    return histogram.counts[histogram.bounds.index(bound)]


def test_estimates_are_counted_by_operator_and_provenance() -> None:
    statistics = PredictionStatistics()
    statistics.observe(_table(), _answer([_MEASURED, _BEYOND, _BEYOND], [1.0, 2.0, 2.0]), 0.001)
    statistics.observe(_table(), _answer([_MEASURED], [1.0]), 0.001)
    statistics.observe(_table("rope"), _answer([_BEYOND], [2.0]), 0.001)
    counted = {
        (operator, provenance): found.num_estimates
        for operator, one in statistics.read().operators.items()
        for provenance, found in one.provenances.items()
    }
    expected = {("gemm", _MEASURED): 2, ("gemm", _BEYOND): 2, ("rope", _BEYOND): 1}
    assert expected == counted


def test_widths_fall_into_the_bucket_whose_bound_they_do_not_exceed() -> None:
    statistics = PredictionStatistics()
    statistics.observe(_table(), _answer([_BEYOND] * 4, [1.5, 1.6, 2.0, 50.0]), 0.001)
    width = statistics.read().operators["gemm"].provenances[_BEYOND].interval_ratio
    assert (1, 2) == (_bucket(width, 1.5), _bucket(width, 2.0))
    assert (1, 4) == (width.counts[-1], width.num_values)
    assert math.isclose(55.1, width.total)
    assert INTERVAL_RATIO_BOUNDS == width.bounds


def test_what_has_no_bound_or_no_neighbour_counts_as_the_most() -> None:
    statistics = PredictionStatistics()
    answer = LatencyColumns(
        latency_us=np.array([1.0, 1.0]),
        low_us=np.array([0.0, 0.0]),
        high_us=np.array([2.0, 0.0]),
        provenance=np.full(2, _BEYOND.value),
        nearest_octaves=np.array([np.inf, 1.0]),
    )
    statistics.observe(_table(), answer, 0.001)
    found = statistics.read().operators["gemm"].provenances[_BEYOND]
    assert (2, 2 * MAX_INTERVAL_RATIO) == (
        found.interval_ratio.counts[-1],
        found.interval_ratio.total,
    )
    assert (1, 1, MAX_OCTAVES + 1.0) == (
        found.nearest_octaves.counts[-1],
        _bucket(found.nearest_octaves, 1.0),
        found.nearest_octaves.total,
    )


def test_an_answer_that_does_not_say_its_neighbours_counts_no_distance() -> None:
    statistics = PredictionStatistics()
    statistics.observe(_table(), _answer([_MEASURED], [1.0]), 0.001)
    statistics.observe(_table(), _answer([_MEASURED], [1.0], [0.0]), 0.001)
    found = statistics.read().operators["gemm"].provenances[_MEASURED]
    assert (2, 1) == (found.num_estimates, found.nearest_octaves.num_values)
    assert NEAREST_OCTAVES_BOUNDS == found.nearest_octaves.bounds


def test_seconds_are_those_of_tables_even_of_empty_ones() -> None:
    statistics = PredictionStatistics()
    statistics.observe(_table(), _answer([_BEYOND] * 2, [1.0, 1.0]), 0.001)
    statistics.observe(_table(), _answer([], [], []), 100.0)
    found = statistics.read().operators["gemm"]
    assert (2, 1, 1) == (
        found.seconds.num_values,
        _bucket(found.seconds, 0.001),
        found.seconds.counts[-1],
    )
    assert math.isclose(100.001, found.seconds.total)


def test_refusals_cache_and_models_are_counted() -> None:
    statistics = PredictionStatistics()
    statistics.observe_refusal("gemm")
    statistics.observe_refusal("gemm")
    for is_hit in (True, True, False):
        statistics.observe_cache(is_hit=is_hit)
    statistics.observe_model("v1")
    statistics.observe_model("v2")
    statistics.observe_failed_model_load()
    found = statistics.read()
    assert {"gemm": 2} == found.num_refusals
    assert (2, 1) == (found.num_cache_hits, found.num_cache_misses)
    assert ("v2", 2, 1) == (
        found.model_version,
        found.num_model_loads,
        found.num_failed_model_loads,
    )


def test_what_was_read_stays_as_it_was() -> None:
    statistics = PredictionStatistics()
    statistics.observe(_table(), _answer([_MEASURED], [1.0]), 0.001)
    before = statistics.read()
    statistics.observe(_table(), _answer([_MEASURED], [1.0]), 0.001)
    assert 1 == before.operators["gemm"].provenances[_MEASURED].num_estimates


def test_threads_lose_no_count() -> None:
    statistics = PredictionStatistics()
    answer = _answer([_MEASURED, _BEYOND], [1.0, 2.0], [0.0, 1.0])

    def observe_many() -> None:
        for _ in range(200):
            statistics.observe(_table(), answer, 0.001)

    threads = [threading.Thread(target=observe_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = statistics.read().operators["gemm"]
    assert (800, 800, 800) == (
        found.seconds.num_values,
        found.provenances[_MEASURED].num_estimates,
        found.provenances[_BEYOND].nearest_octaves.num_values,
    )
