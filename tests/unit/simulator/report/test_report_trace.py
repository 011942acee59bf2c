"""The Chrome trace of a training step."""

import json

from report_examples import build_training, infeasible_training

from foretoken.simulator.report.trace import chrome_trace


def test_every_span_is_an_event_in_microseconds() -> None:
    report = build_training()
    trace = json.loads(json.dumps(chrome_trace(report)))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(report.pipeline) == len(events)
    first = next(event for event in events if event["name"] == "backward 1")
    assert (60_000.0, 9_000.0) == (first["ts"], first["dur"])
    assert "optimizer" in {event["name"] for event in events}


def test_sends_have_a_lane_of_their_own() -> None:
    trace = chrome_trace(build_training())
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    (send,) = (e for e in trace["traceEvents"] if e.get("cat") == "send_forward")
    assert "stage 0 sends" == names[send["tid"]]
    assert len(set(names.values())) == len(names)


def test_a_report_without_pipeline_gives_an_empty_trace() -> None:
    assert [] == chrome_trace(infeasible_training())["traceEvents"]
