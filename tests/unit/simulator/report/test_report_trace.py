"""The Chrome trace of a training step."""

import json

from training_examples import build_training, infeasible_training, span_columns

from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.perfetto import training_trace


def test_every_span_is_an_event_in_microseconds() -> None:
    report = build_training()
    trace = json.loads(json.dumps(training_trace(report)))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(report.spans.kind) == len(events)
    first = next(event for event in events if event["name"] == "backward 1")
    assert (60_000.0, 9_000.0) == (first["ts"], first["dur"])
    assert "optimizer" in {event["name"] for event in events}


def test_a_stage_is_a_process_with_a_thread_per_stream() -> None:
    events = training_trace(build_training())["traceEvents"]
    names = {(e["pid"], e["name"], e["tid"]): e["args"]["name"] for e in _metadata(events)}
    assert {
        (0, "process_name", 0): "stage 0",
        (0, "thread_name", 0): "compute",
        (0, "thread_name", 1): "communication",
        (1, "process_name", 0): "stage 1",
        (1, "thread_name", 0): "compute",
        (1, "thread_name", 1): "communication",
    } == names
    sends = {event["tid"] for event in events if event.get("cat") == "send_forward"}
    assert {1} == sends


def test_transfers_at_once_have_threads_of_their_own() -> None:
    """Viewers draw overlapping events of one thread as if one had called the other."""
    spans = span_columns(
        [
            (0, 0, 0, "send_forward", 0.0, 10.0),
            (0, 0, 1, "send_backward", 5.0, 12.0),
            (0, 0, 1, "send_forward", 10.0, 15.0),
        ]
    )
    events = training_trace(TrainingReport(spans=spans))["traceEvents"]
    assert [1, 3, 1] == [event["tid"] for event in events if event["ph"] == "X"]
    assert "communication 2" in {event["args"]["name"] for event in _metadata(events)}


def test_passes_that_run_together_have_threads_of_their_own() -> None:
    spans = span_columns([(0, 0, 1, "forward", 0.0, 9.0), (0, 3, 0, "backward", 0.0, 9.0)])
    events = training_trace(TrainingReport(spans=spans))["traceEvents"]
    assert [0, 2] == [event["tid"] for event in events if event["ph"] == "X"]
    assert "compute 2" in {event["args"]["name"] for event in _metadata(events)}


def test_memory_is_a_curve_of_each_stage() -> None:
    events = training_trace(build_training())["traceEvents"]
    curve = [e for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert [(0.0, 18.0), (20_000.0, 28.0), (40_000.0, 19.0)] == [
        (event["ts"], event["args"]["allocated"]) for event in curve
    ]


def test_a_report_without_pipeline_gives_an_empty_trace() -> None:
    assert [] == training_trace(infeasible_training())["traceEvents"]


def _metadata(events: list[dict]) -> list[dict]:
    return [e for e in events if e["ph"] == "M" and "name" in e["args"]]
