"""What the engines held over time, and the series of a run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_records import MS, NUM_BLOCKS, TinyRequest, TinyRules, run_tiny_engines, tiny_runs

from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.cluster.fleet import make_fleet
from foretoken.simulator.serving.metrics import busy_ns
from foretoken.simulator.serving.occupancy import (
    Interval,
    find_interval,
    held_ns,
    integrate,
    interval_edges,
    series_of,
)
from foretoken.simulator.serving.record import ServingRecord

_SCENARIO = ServingScenario(model=find_model("llama-3-8b"), device="h100_sxm")
_Run = tuple[list[TinyRequest], ServingRecord]


def test_a_series_has_whole_seconds_and_longer_ones_in_a_very_long_run() -> None:
    assert interval_edges(Interval(start_ns=5, end_ns=2 * NS_PER_S + 1)).tolist() == [
        second * NS_PER_S for second in range(4)
    ]
    edges = interval_edges(Interval(start_ns=0, end_ns=25_000 * NS_PER_S))
    assert edges[1] == 3 * NS_PER_S
    assert len(edges) <= 10_001
    assert edges[-1] >= 25_000 * NS_PER_S


@settings(max_examples=25, deadline=None)
@given(
    gaps=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 9)), max_size=9),
    width=st.integers(1, 40),
)
def test_an_integral_over_intervals_is_that_of_every_instant(
    gaps: list[tuple[int, int, int]], width: int
) -> None:
    start, spans, values, instants = [], [], [], []
    for pause, span, value in gaps:
        instants += [0] * pause
        start.append(len(instants))
        instants += [value] * span
        spans.append(span)
        values.append(value)
    num_intervals = -(-max(len(instants), 1) // width)
    instants += [0] * (num_intervals * width - len(instants))
    expected = np.array(instants).reshape(num_intervals, width).sum(axis=1) / NS_PER_S
    columns = (np.array(column, dtype=np.int64) for column in (start, spans, values))
    found = integrate(*columns, np.arange(num_intervals + 1) * width)
    assert found == pytest.approx(expected, abs=1e-15)


@settings(max_examples=25, deadline=None)
@given(run=tiny_runs())
def test_a_series_adds_up_to_the_run(run: _Run) -> None:
    requests, record = run
    if not any(request.is_done for request in requests if request.answer):
        return
    series = series_of(record, make_fleet(_SCENARIO, record))
    end_ns = interval_edges(find_interval(record))[-1]
    num_arrived = sum(request.arrival_ns <= end_ns for request in requests)
    assert series["num_arrivals"].sum() == num_arrived
    assert series["num_completions"].sum() == sum(bool(r.token_ns) for r in requests)
    assert series["num_first_tokens"].sum() == sum(bool(r.token_ns) for r in requests)
    assert series["num_output_tokens"].sum() == sum(len(r.token_ns) for r in requests)
    assert series["num_prefill_tokens"].sum() == sum(
        int(steps.prefill_tokens.sum()) for steps in record.steps
    )
    running_s = sum(float(held_ns(s) @ s.num_running) for s in record.steps) / NS_PER_S
    assert series["running_mean"].sum() == pytest.approx(running_s)
    busy_s = sum(float(busy_ns(s, 1).sum()) for s in record.steps) / NS_PER_S
    assert series["utilization_ratio"].sum() == pytest.approx(busy_s / len(record.steps))


def test_a_series_of_two_seconds() -> None:
    requests = [
        TinyRequest(arrival_ns=0, prompt=6, answer=1),
        TinyRequest(arrival_ns=1500 * MS, prompt=3, answer=2),
    ]
    record = run_tiny_engines(requests, TinyRules(step_ns=(199 * MS,)))
    series = {
        name: values.tolist()
        for name, values in series_of(record, make_fleet(_SCENARIO, record)).items()
    }
    assert series == {
        "start_s": [0.0, 1.0],
        "num_arrivals": [1, 1],
        "num_first_tokens": [1, 1],
        "num_completions": [1, 1],
        "num_prefill_tokens": [6, 3],
        "num_output_tokens": [1, 2],
        "running_mean": pytest.approx([0.2, 0.4]),
        "waiting_mean": [0.0, 0.0],
        "kv_utilization_ratio": pytest.approx([0.4 / NUM_BLOCKS, 0.4 / NUM_BLOCKS]),
        "batch_size_mean": [1.0, 1.0],
        "utilization_ratio": pytest.approx([0.199, 0.398]),
        "power_w": [0.0, 0.0],
        "replicas_mean": [1.0, 1.0],
    }
