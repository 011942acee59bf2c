"""Sessions of agents as Weka, AgentX and llm-d record them: who waits, and what is shared."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.simulator.workload.call_graph import order_spans
from foretoken.simulator.workload.request_plan import NONE, RequestPlan, find_sessions
from foretoken.simulator.workload.requests import resolve_workload
from foretoken.simulator.workload.trace import TraceContent, load_trace


def _call(t: float, took: float, num_prompt: int, hashes: list[int], **more: Any) -> dict[str, Any]:
    call = {"t": t, "type": "s", "model": "opus", "in": num_prompt, "out": 10, "hash_ids": hashes}
    return call | {"api_time": took} | more


def _session(*requests: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "one", "models": ["opus"], "block_size": 64, "requests": list(requests)} | more


def _load(path: Path, *sessions: Mapping[str, Any]) -> TraceContent:
    path.write_text("\n".join(map(json.dumps, sessions)), encoding="utf-8")
    return load_trace(path)


def _graph(content: TraceContent) -> list[tuple[int, tuple[int, ...], float]]:
    return [(r.session, r.after, round(r.think_s, 6)) for r in content.requests]


# The main agent makes a call, sends out two agents side by side, and goes on when both are done.
_AGENTS = (
    _call(0.0, 2.0, 130, [1, 2]),
    {
        "t": 3.0,
        "type": "subagent",
        "agent_id": "a",
        "duration_ms": 7000,
        "requests": [_call(0.0, 1.0, 70, [1]), _call(1.5, 2.0, 140, [1, 7])],
    },
    {
        "t": 3.5,
        "type": "subagent",
        "agent_id": "b",
        "requests": [_call(0.0, 1.0, 64, [9], model="haiku")],
    },
    _call(11.0, 1.0, 260, [1, 2, 3, 4]),
)


def test_agents_that_were_sent_out_run_side_by_side_and_are_waited_for(tmp_path: Path) -> None:
    """Times to think count from the last answer: 4.5 s after the end of agent a's last call."""
    content = _load(tmp_path / "trace", _session(*_AGENTS))
    assert [
        (1, (), 0.0),
        (2, (0,), 1.0),
        (3, (0,), 1.5),
        (2, (1,), 0.5),
        (1, (2, 3), 4.5),
    ] == _graph(content)
    assert [130, 70, 64, 140, 260] == [r.num_prefill_tokens for r in content.requests]
    assert 64 == content.hash_block_tokens


def test_times_of_agents_may_count_from_the_session_s_begin(tmp_path: Path) -> None:
    absolute = []
    for item in _AGENTS:
        calls = [call | {"t": call["t"] + item["t"]} for call in item.get("requests", [])]
        absolute.append(item | ({"requests": calls} if calls else {}))
    relative = _load(tmp_path / "relative", _session(*_AGENTS))
    assert relative.requests == _load(tmp_path / "absolute", _session(*absolute)).requests


def test_calls_that_overlapped_stay_side_by_side(tmp_path: Path) -> None:
    """Workers that were recorded in the main agent's own list fork from it and are joined."""
    content = _load(
        tmp_path / "trace",
        _session(
            _call(0.0, 1.0, 192, [1, 2, 3]),
            _call(2.0, 5.0, 256, [1, 2, 50, 51]),
            _call(2.5, 2.0, 256, [1, 2, 60, 61]),
            _call(9.0, 1.0, 320, [1, 2, 3, 4, 5]),
        ),
    )
    # The last one continues the first, whose answer its prompt holds; the workers are their own.
    assert [(1, (), 0), (2, (0,), 1.0), (3, (0,), 1.5), (1, (1, 2), 2.0)] == _graph(content)


def test_calls_without_their_time_follow_each_other_as_recorded(tmp_path: Path) -> None:
    calls = [_call(float(t), 0, 64 * (i + 1), list(range(i + 1))) for i, t in enumerate((0, 4, 9))]
    for call in calls:
        del call["api_time"]
    content = _load(tmp_path / "trace", _session(*calls))
    assert [(1, (), 0), (1, (0,), 4.0), (1, (1,), 5.0)] == _graph(content)


def test_hashes_are_names_within_a_session_or_of_all(tmp_path: Path) -> None:
    local = [_session(_call(0, 1, 128, [1, 2]), id=name) for name in "ab"]
    one, other = (r.block_hashes for r in _load(tmp_path / "local", *local).requests)
    assert set(one).isdisjoint(other)
    shared = [session | {"hash_id_scope": "global"} for session in local]
    one, other = (r.block_hashes for r in _load(tmp_path / "shared", *shared).requests)
    assert one == other


def test_calls_that_failed_are_left_out_and_not_waited_for(tmp_path: Path) -> None:
    calls = [_call(0, 1, 64, [1]), _call(2, 1, 0, []), _call(4, 1, 128, [1, 2])]
    content = _load(tmp_path / "trace", _session(*calls))
    assert [(1, (), 0), (1, (0,), 3.0)] == _graph(content)
    assert 1 == content.num_skipped


def test_a_folder_has_a_session_a_file_and_an_object_may_have_many_lines(tmp_path: Path) -> None:
    session = _session(_call(0, 1, 64, [1]))
    (tmp_path / "b.json").write_text(json.dumps(session, indent=1), encoding="utf-8")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(session).encode()))
    (tmp_path / "notes.txt").write_text("not a trace", encoding="utf-8")
    content = load_trace(tmp_path)
    assert [1, 2] == [request.session for request in content.requests]


def test_a_folder_without_traces_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"none of its files ends in \.json"):
        load_trace(tmp_path)


def test_a_line_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    session = _session(_call(0, 1, 64, [1]))
    with pytest.raises(InvalidRequestError, match="trace:2: requests: expected a list of objects"):
        _load(tmp_path / "trace", session, _session() | {"requests": [7]})
    with pytest.raises(InvalidRequestError, match="trace:2: block_size: 16, in the sessions"):
        _load(tmp_path / "trace", session, _session(block_size=16))


def _span(
    name: str, parent: str, start_s: float, end_s: float, messages: list[str] | None = None
) -> dict[str, Any]:
    span: dict[str, Any] = {
        "span_id": name,
        "parent_span_id": parent,
        "trace_id": "t",
        "start_time": f"2026-01-01T00:00:{start_s:06.3f}Z",
        "end_time": f"2026-01-01T00:00:{end_s:06.3f}Z",
        "attributes": {},
    }
    if messages is not None:
        listed = [{"role": "user", "content": text} for text in messages]
        num_tokens = sum(len(json.dumps(item, sort_keys=True)) + 1 for item in listed) - 1
        span["attributes"] = {
            "gen_ai.request.model": "m",
            "gen_ai.input.messages": json.dumps(listed),
            "gen_ai.usage.prompt_tokens": num_tokens,
            "gen_ai.usage.completion_tokens": 5,
        }
    return span


_SPANS = (
    _span("run", "", 0, 30),
    _span("plan", "run", 1, 2, ["a" * 100]),
    _span("agent 1", "run", 3, 9),
    _span("agent 2", "run", 3, 8),
    _span("read", "agent 1", 3, 4, ["a" * 100, "b" * 60]),
    _span("tool", "agent 1", 4, 8),
    _span("write", "agent 1", 8, 9, ["c" * 100]),
    _span("think", "agent 2", 5, 6, ["d" * 100]),
    _span("answer", "run", 10, 11, ["a" * 100, "e" * 90]),
)


def test_spans_of_agents_are_branches_of_a_session(tmp_path: Path) -> None:
    """A character is a token here; prompts share the whole blocks of their equal beginnings."""
    content = _load(tmp_path / "trace", {"spans": _SPANS})
    assert [
        (1, (), 0.0),
        (1, (0,), 1.0),
        (2, (0,), 3.0),
        (3, (1,), 4.0),
        (4, (2, 3), 1.0),
    ] == _graph(content)
    plan, read, _, write, answer = (request.block_hashes for request in content.requests)
    assert 16 == content.hash_block_tokens
    assert plan == read[: len(plan)] == answer[: len(plan)]
    assert len(plan) == content.requests[0].num_prefill_tokens // 16
    assert len(set(read) & set(answer)) < min(len(read), len(answer))
    assert len(write) == content.requests[3].num_prefill_tokens // 16


def test_an_export_in_otlp_is_the_same_trace(tmp_path: Path) -> None:
    spans = []
    for span in _SPANS:
        attributes = [
            {"key": key, "value": {"stringValue": str(value)}}
            for key, value in span["attributes"].items()
        ]
        times = [1_767_225_600_000_000_000 + round(float(span[name][17:23]) * 1e9)
                 for name in ("start_time", "end_time")]  # fmt: skip
        spans.append(
            {
                "traceId": span["trace_id"],
                "spanId": span["span_id"],
                "parentSpanId": span["parent_span_id"],
                "startTimeUnixNano": str(times[0]),
                "endTimeUnixNano": times[1],
                "attributes": attributes,
            }
        )
    exported = {"resourceSpans": [{"scopeSpans": [{"spans": spans[:4]}, {"spans": spans[4:]}]}]}
    expected = _load(tmp_path / "spans", {"spans": _SPANS})
    assert expected.requests == _load(tmp_path / "otlp", exported).requests


def test_sessions_begin_when_they_did_and_failed_calls_are_left_out(tmp_path: Path) -> None:
    failed = _span("b", "", 2, 3, ["x"])
    failed["attributes"]["gen_ai.usage.completion_tokens"] = 0
    late = _span("a", "", 7.5, 8, ["x"]) | {"trace_id": "u"}
    content = _load(tmp_path / "trace", {"spans": [_span("a", "", 1, 2, ["x"]), failed, late]})
    assert [0.0, 6.5] == [request.arrival_s for request in content.requests]
    assert 1 == content.num_skipped


def _plan(content: TraceContent, **options: str) -> RequestPlan:
    spec = WorkloadSpec(
        arrival="trace",
        trace_requests=content.requests,
        hash_block_tokens=content.hash_block_tokens,
        arrival_options=options,
    )
    return resolve_workload(spec, (), 3)


def test_the_next_turn_names_the_answer_before_and_agents_are_of_the_session(
    tmp_path: Path,
) -> None:
    plan = _plan(_load(tmp_path / "trace", _session(*_AGENTS)))
    assert [NONE, NONE, NONE, 1, 0] == plan.follows.tolist()
    assert [0] * 5 == find_sessions(plan.follows, plan.joins).tolist()
    # The first prompt and its answer are 140 tokens, two whole blocks of 64.
    assert [2, 1, 1, 2, 4] == [int(n) for n in plan.hash_offsets[1:] - plan.hash_offsets[:-1]]


def test_sessions_can_begin_at_a_rate_and_think_no_longer_than_asked(tmp_path: Path) -> None:
    sessions = [_session(*_AGENTS, id=str(number)) for number in range(400)]
    plan = _plan(_load(tmp_path / "trace", *sessions), session_rate_rps="2", max_think_s="1.25")
    session = find_sessions(plan.follows, plan.joins)
    firsts = plan.arrival_ns[session == range(plan.num_requests)]
    assert 400 == len(firsts)
    assert 400 / (firsts[-1] / 1e9) == pytest.approx(2.0, rel=0.15)
    assert plan.arrival_ns.tolist() == plan.arrival_ns[session].tolist()
    assert {0, 500_000_000, 1_000_000_000, 1_250_000_000} == set(plan.think_ns.tolist())


def test_a_closed_loop_has_no_rate_of_sessions() -> None:
    content = TraceContent((Request(arrival_s=0, num_prefill_tokens=1, num_decode_tokens=1),))
    with pytest.raises(InvalidRequestError, match="session_rate_rps: a closed loop begins"):
        _plan(content, concurrency="2", session_rate_rps="1")


_TIMES = st.sampled_from([0.0, 1.0, 1.5, 2.0, 5.0])


@given(st.lists(st.tuples(_TIMES, _TIMES), max_size=12))
def test_a_span_waits_for_all_that_had_ended_directly_or_not(
    drawn: list[tuple[float, float]],
) -> None:
    """Edges are as few as keep the order: none is implied by the others."""
    spans = [(start, start + length) for start, length in drawn]
    ordered = order_spans(spans)
    assert sorted(range(len(spans)), key=lambda each: (spans[each][0], each)) == [
        index for index, _ in ordered
    ]
    before: dict[int, set[int]] = {}
    for index, earlier in ordered:
        implied = set().union(*(before[each] for each in earlier)) if earlier else set()
        assert implied.isdisjoint(earlier)
        before[index] = implied | set(earlier)
        expected = {each for each in before if spans[each][1] <= spans[index][0]} - {index}
        assert expected == before[index]
