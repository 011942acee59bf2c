import numpy as np
import pytest

from foretoken.domain.report import Percentiles
from foretoken.domain.slo import Slo
from foretoken.simulator.serving.metrics import (
    collect_times,
    count_attaining,
    summarize_token_gaps,
)
from foretoken.simulator.serving.percentile import summarize
from foretoken.simulator.serving.request import SimRequest

_MS = 1_000_000


def _finished(arrival_ms: int, runs: list[list[int]], replica: int = 0) -> SimRequest:
    num_tokens = sum(count for _, count in runs)
    request = SimRequest(0, arrival_ms * _MS, 10, num_tokens)
    request.replica = replica
    request.scheduled_ns = (arrival_ms + 1) * _MS
    for first, count in runs:
        request.emit_tokens(first, count)
    return request


# Steps of replica 0 end at 10, 20, 40, 70, 110 ms, of replica 1 at 5, 6 ms.
_ENDS = [np.array([10, 20, 40, 70, 110]) * _MS, np.array([5, 6]) * _MS]


def test_times_of_a_request_follow_its_token_runs() -> None:
    requests = [_finished(2, [[1, 2], [4, 1]]), SimRequest(1, 3 * _MS, 10, 5)]
    times = collect_times(requests, _ENDS)
    assert times.ttft_ns.tolist() == [18 * _MS]
    assert times.e2e_ns.tolist() == [108 * _MS]
    assert times.tpot_ns.tolist() == [45 * _MS]
    columns = times.columns()
    assert columns.first_token_s == (0.02, -1.0)
    assert columns.finished_s == (0.11, -1.0)
    assert columns.scheduled_s == (0.003, -1.0)


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    times = collect_times([_finished(0, [[0, 1]])], _ENDS)
    assert np.isnan(times.tpot_ns).tolist() == [True]


def test_token_gaps_count_once_per_token_and_pauses_count_whole() -> None:
    requests = [_finished(0, [[0, 3]]), _finished(0, [[1, 2], [4, 1]]), _finished(0, [[0, 2]], 1)]
    # 10, 20 of the first; 20 and the pause of 70 of the second; 1 of the third.
    assert summarize_token_gaps(requests, _ENDS) == summarize([10, 20, 20, 70, 1])


def test_a_request_attains_when_it_meets_every_limit() -> None:
    requests = [_finished(0, [[0, 3]]), _finished(0, [[1, 2], [4, 1]]), SimRequest(2, 0, 1, 1)]
    times = collect_times(requests, _ENDS)

    def attaining(**limits: float) -> int:
        return count_attaining(times, Slo(**limits), requests, _ENDS)

    assert attaining() == 2
    assert attaining(ttft_ms=15) == 1
    assert attaining(ttft_ms=20, e2e_latency_ms=40) == 1
    assert attaining(tpot_ms=15) == 1
    assert attaining(itl_ms=20, itl_percentile=100) == 1
    assert attaining(itl_ms=70, itl_percentile=100) == 2
    assert attaining(itl_ms=45, itl_percentile=50) == 2


def test_weighted_percentiles_are_those_of_the_repeated_values() -> None:
    generator = np.random.default_rng(0)
    values = generator.uniform(size=40)
    counts = generator.integers(0, 5, 40)
    repeated = np.repeat(values, counts)
    summary = summarize(values, counts)
    assert summary.mean == pytest.approx(repeated.mean())
    for ratio, found in ((50, summary.p50), (95, summary.p95), (99, summary.p99)):
        assert found == pytest.approx(np.percentile(repeated, ratio))
    assert summary.max == repeated.max()


def test_nothing_observed_is_all_zero() -> None:
    assert summarize([]) == Percentiles()
    assert summarize([1.0], [0]) == Percentiles()
