"""Times of requests, gaps between tokens, and their summaries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_records import MS, TinyRequest, TinyRules, run_tiny_engines, tiny_runs

from foretoken.domain.requests.slo import Slo
from foretoken.domain.results.report import ITL_QUANTILES, Percentiles
from foretoken.simulator.serving.metrics import (
    OF_PARTS,
    busy_ns,
    count_whole,
    describe,
    execution_ns,
    instants_of,
    make_histogram,
    place_runs,
    summarize,
    summarize_latencies,
    summarize_over_time,
    summarize_requests,
    summarize_token_gaps,
)
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.service_level import find_attaining

_Run = tuple[list[TinyRequest], ServingRecord]


def _two_requests() -> _Run:
    """Return a prompt of two chunks and one that waits for its place; steps take 1 + 10 ms."""
    requests = [
        TinyRequest(arrival_ns=2 * MS, prompt=12, answer=3),
        TinyRequest(arrival_ns=3 * MS, prompt=4, answer=1),
    ]
    return requests, run_tiny_engines(requests, TinyRules(max_seqs=1))


def test_latencies_count_from_arrival_schedule_and_first_token() -> None:
    """Steps end at 13, 24, 35, 46 and 57 ms; the second request starts at 46 ms."""
    _, record = _two_requests()
    found = summarize_requests(record)
    assert found["ttft_ms"] == summarize([22.0, 54.0])
    assert found["e2e_latency_ms"] == summarize([44.0, 54.0])
    assert found["e2e_latency_ms_per_token"] == summarize([44 / 3, 54.0])
    assert found["queueing_ms"] == summarize([0.0, 43.0])
    assert found["service_ms"] == summarize([44.0, 11.0])
    assert found["prefill_ms"] == summarize([22.0, 11.0])
    assert found["prefill_ms_per_token"] == summarize([22 / 12, 11 / 4])
    assert found["decode_ms"] == summarize([22.0, 0.0])
    assert found["interarrival_ms"] == summarize([1.0])
    assert found["prompt_tokens"] == summarize([12, 4])
    assert found["answer_tokens"] == summarize([3, 1])


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    _, record = _two_requests()
    assert summarize_requests(record)["tpot_ms"] == summarize([11.0])


def test_a_step_is_busy_from_its_start_and_hides_what_the_host_does_after_the_next_began() -> None:
    _, record = _two_requests()
    (steps,) = record.steps
    assert busy_ns(steps, 1).tolist() == [10 * MS] * 5
    early = steps.start_ns.copy()
    early[1:] -= 4 * MS
    overlapping = type(steps)(
        **{name: getattr(steps, name) for name in steps.__dataclass_fields__ if name != "start_ns"},
        start_ns=early,
    )
    assert busy_ns(overlapping, 1).tolist() == [7 * MS, 11 * MS, 11 * MS, 11 * MS, 14 * MS]
    assert busy_ns(overlapping, 2).tolist() == [10 * MS, 14 * MS, 14 * MS, 14 * MS, 14 * MS]


@settings(max_examples=40, deadline=None)
@given(run=tiny_runs())
def test_summaries_are_those_of_every_single_token(run: _Run) -> None:
    requests, record = run
    done = [request for request in requests if request.token_ns]
    found = summarize_requests(record)
    ttft = [(request.token_ns[0] - request.arrival_ns) / MS for request in done]
    assert found["ttft_ms"] == summarize(ttft)
    tpot = [
        (request.token_ns[-1] - request.token_ns[0]) / (request.answer - 1) / MS
        for request in done
        if request.answer > 1
    ]
    assert found["tpot_ms"].p90 == pytest.approx(summarize(tpot).p90)
    gaps = [gap / MS for request in done for gap in np.diff(request.token_ns).tolist()]
    summary, quantiles = summarize_token_gaps(place_runs(record))
    expected = summarize(gaps)
    for name in Percentiles.__dataclass_fields__:
        assert getattr(summary, name) == pytest.approx(getattr(expected, name))
    if gaps:
        assert quantiles == pytest.approx(np.percentile(gaps, ITL_QUANTILES))
    else:
        assert quantiles == ()


@settings(max_examples=40, deadline=None)
@given(run=tiny_runs())
def test_execution_is_the_time_in_steps_at_all_attempts(run: _Run) -> None:
    requests, record = run
    found = execution_ns(record, place_runs(record), [1] * len(record.steps))
    assert found.tolist() == [request.executed_ns for request in requests]


@settings(max_examples=40, deadline=None)
@given(
    run=tiny_runs(),
    itl_ms=st.floats(0, 900),
    percentile=st.floats(0, 100),
    ttft_ms=st.floats(0, 5000),
)
def test_a_request_attains_when_it_meets_every_limit_of_its_class(
    run: _Run, itl_ms: float, percentile: float, ttft_ms: float
) -> None:
    requests, record = run
    classes = (
        Slo(itl_ms=itl_ms, itl_percentile=percentile),
        Slo(ttft_ms=ttft_ms),
        Slo(tpot_ms=200, e2e_latency_ms=4000),
    )
    attains = find_attaining(record.requests, place_runs(record), classes)
    assert attains.tolist() == [_meets(request, classes) for request in requests]


def _meets(request: TinyRequest, classes: tuple[Slo, ...]) -> bool:
    slo = classes[request.slo_class]
    if not request.token_ns:
        return False
    gaps = np.diff(request.token_ns) / MS
    values = {
        "ttft_ms": (request.token_ns[0] - request.arrival_ns) / MS,
        "e2e_latency_ms": (request.token_ns[-1] - request.arrival_ns) / MS,
        "tpot_ms": float(gaps.mean()) if len(gaps) else 0.0,
        "itl_ms": float(np.percentile(gaps, slo.itl_percentile)) if len(gaps) else 0.0,
    }
    return all(
        getattr(slo, name) == 0 or value <= getattr(slo, name) for name, value in values.items()
    )


def test_latencies_of_a_part_of_the_requests_leave_the_others_out() -> None:
    _, record = _two_requests()
    found = summarize_latencies(instants_of(record.requests), OF_PARTS, np.array([False, True]))
    assert found["ttft_ms"] == summarize([54.0])
    assert found["tpot_ms"] == Percentiles()


def test_weighted_percentiles_are_those_of_the_repeated_values() -> None:
    generator = np.random.default_rng(0)
    values = generator.uniform(size=40)
    counts = generator.integers(0, 5, 40)
    repeated = np.repeat(values, counts)
    summary, quantiles = describe(values, counts, (0, 33, 100), scale=2.0)
    assert summary.mean == pytest.approx(2 * repeated.mean())
    for ratio, found in ((50, summary.p50), (95, summary.p95), (99, summary.p99)):
        assert found == pytest.approx(2 * np.percentile(repeated, ratio))
    assert quantiles == pytest.approx(2 * np.percentile(repeated, (0, 33, 100)))
    assert summary.max == 2 * repeated.max()


@given(
    data=st.lists(
        st.tuples(st.sampled_from([0, 5, 7, 2**42, 2**44]), st.sampled_from([0, 1, 3, 2**21])),
        min_size=1,
        max_size=12,
    )
)
def test_whole_values_of_any_size_are_sorted_with_their_counts(data: list[tuple[int, int]]) -> None:
    values, counts = np.array(data).T
    as_floats = describe(values.astype(np.float64), counts, (0, 25, 100))
    assert describe(values, counts, (0, 25, 100)) == as_floats


def test_nothing_observed_is_all_zero() -> None:
    assert summarize([]) == Percentiles()
    assert summarize([1.0], [0]) == Percentiles()
    assert summarize_over_time(np.array([3]), np.array([0])) == Percentiles()


def test_a_count_over_time_weighs_by_how_long_it_stood() -> None:
    summary = summarize_over_time(np.array([1, 5, 1, 2]), np.array([30, 1, 30, 39]))
    assert summary.mean == pytest.approx((60 + 5 + 78) / 100)
    assert (summary.p50, summary.p95, summary.max) == (1, 2, 5)


@given(values=st.lists(st.integers(0, 9000), min_size=1, max_size=50))
def test_a_histogram_has_every_value_in_one_range(values: list[int]) -> None:
    histogram = make_histogram(*count_whole(np.array(values)))
    assert len(histogram.edges) == len(histogram.shares) + 1
    assert len(histogram.shares) <= 64
    assert sum(histogram.shares) == pytest.approx(1)
    for value in values:
        place = np.searchsorted(histogram.edges, value, side="right") - 1
        assert histogram.shares[place] > 0
