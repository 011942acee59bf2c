"""The Chrome trace of a serving simulation."""

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from serving_records import MS, TinyRequest, TinyRules, run_tiny_engines

from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.perfetto import serving_trace
from foretoken.simulator.serving.tables import build_tables

_SCENARIO = ServingScenario(model=find_model("llama-3-8b"), device="h100_sxm")


def _tables(num_engines: int = 2) -> dict[str, pa.Table]:
    requests = [TinyRequest(arrival_ns=20 * i * MS, prompt=9, answer=5) for i in range(20)]
    record = run_tiny_engines(requests, TinyRules(preempt_every=7), num_engines)
    return build_tables(record, _SCENARIO)


def _trace(tables: dict[str, pa.Table], **options: int) -> list[dict[str, Any]]:
    trace = serving_trace(tables["steps"], tables["requests"], **options)
    events: list[dict[str, Any]] = json.loads(json.dumps(trace))["traceEvents"]
    return events


def test_every_step_is_a_box_of_its_engine_in_microseconds() -> None:
    tables = _tables()
    boxes = [event for event in _trace(tables) if event["ph"] == "X"]
    assert Counter(box["pid"] - 1 for box in boxes) == Counter(
        tables["steps"].column("engine").to_pylist()
    )
    first = boxes[0]
    assert (first["ts"], first["dur"]) == (pytest.approx(1000), pytest.approx(10_000))
    assert first["args"]["num_tokens"] == 8
    assert first["name"] == "prefill 1"


def test_engines_and_requests_are_processes_with_names() -> None:
    names = {
        event["pid"]: event["args"]["name"]
        for event in _trace(_tables())
        if event["name"] == "process_name"
    }
    assert names == {0: "requests", 1: "engine 0", 2: "engine 1"}


def test_boxes_of_a_thread_do_not_overlap() -> None:
    tables = _tables(1)
    steps = tables["steps"]
    late = np.asarray(steps.column("end_s")) + 0.008
    place = steps.schema.get_field_index("end_s")
    tables["steps"] = steps.set_column(place, "end_s", pa.array(late))
    boxes = [event for event in _trace(tables) if event["ph"] == "X"]
    assert len({box["tid"] for box in boxes}) == 2
    _check_threads(boxes)


def test_tokens_handed_out_behind_the_next_step_need_no_second_thread() -> None:
    tables = _tables(1)
    steps = tables["steps"]
    late = np.asarray(steps.column("end_s")) + 0.002
    place = steps.schema.get_field_index("end_s")
    tables["steps"] = steps.set_column(place, "end_s", pa.array(late))
    boxes = [event for event in _trace(tables) if event["ph"] == "X"]
    assert {box["tid"] for box in boxes} == {0}
    _check_threads(boxes)


def _check_threads(boxes: list[dict[str, Any]]) -> None:
    for thread in {box["tid"] for box in boxes}:
        spans = sorted((box["ts"], box["ts"] + box["dur"]) for box in boxes if box["tid"] == thread)
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start + 1e-6


def test_with_times_of_stages_each_has_a_thread_and_follows_the_one_before() -> None:
    tables = _tables(1)
    steps = tables["steps"]
    for stage, time_us in enumerate((3000.0, 5000.0)):
        steps = steps.append_column(f"stage_{stage}_us", pa.array([time_us] * steps.num_rows))
    tables["steps"] = steps
    events = _trace(tables)
    boxes = [event for event in events if event["ph"] == "X"]
    _check_threads(boxes)
    by_stage = {(box["tid"], box["args"]["step"]): box for box in boxes}
    assert by_stage[1, 0]["ts"] == by_stage[0, 0]["ts"] + 3000
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1"}


def test_counters_follow_the_steps() -> None:
    counters = [event for event in _trace(_tables(1)) if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"requests", "KV blocks", "batch"}
    first = next(event for event in counters if event["name"] == "requests")
    assert first["args"] == {"running": 1, "waiting": 0}


def test_spans_of_a_request_open_and_close_in_pairs_inside_its_whole_life() -> None:
    events = [event for event in _trace(_tables(), max_requests=5) if event.get("cat") == "request"]
    assert {event["id"] for event in events} == set(range(5))
    for number in range(5):
        mine = [event for event in events if event["id"] == number]
        whole, parts = (mine[0], mine[-1]), mine[1:-1]
        assert [event["ph"] for event in parts] == ["b", "e"] * (len(parts) // 2)
        assert [event["name"] for event in whole] == [f"request {number}"] * 2
        assert {event["name"] for event in parts} >= {"prefill", "decode"}
        assert all(whole[0]["ts"] <= event["ts"] <= whole[1]["ts"] for event in mine)


def test_a_long_run_is_cut() -> None:
    events = _trace(_tables(), max_steps=6, max_requests=0)
    assert sum(event["ph"] == "X" for event in events) == 6
    assert not [event for event in events if event.get("cat") == "request"]


def test_a_refused_request_has_no_span() -> None:
    requests = [
        TinyRequest(arrival_ns=0, prompt=4, answer=0),
        TinyRequest(arrival_ns=0, prompt=4, answer=1),
    ]
    record = run_tiny_engines(requests, TinyRules(), 1)
    tables = build_tables(record, _SCENARIO)
    assert {e["id"] for e in _trace(tables) if e.get("cat") == "request"} == {1}
