"""Spans of OpenTelemetry's GenAI conventions, as llm-d's inference-perf replays them.

An object has `spans`, or is an export in OTLP's JSON (`resourceSpans`). Spans with token counts
(`gen_ai.usage.input_tokens` and `output_tokens`, or `prompt_tokens` and `completion_tokens`) are
calls; spans above them are agents, which run side by side where they overlap. Spans of one trace id
are a session. Where messages were recorded, prompts share what their texts share: blocks of 16
tokens, whose length in characters is the mean of the file.
Source: opentelemetry.io, semantic conventions for generative AI; inference-perf,
docs/otel_trace_replay.md.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.simulator.workload.call_graph import Branch, Call, CallGraph, Step
from foretoken.simulator.workload.trace import (
    NameTable,
    TraceContent,
    TraceFormat,
    TraceRow,
    TraceRows,
)

_BLOCK_TOKENS = 16
_NS_PER_S = 1e9
_INPUTS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUTS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_MODELS = ("gen_ai.response.model", "gen_ai.request.model")
# In the order in which a prompt has them.
_TEXTS = ("gen_ai.tool.definitions", "gen_ai.system_instructions", "gen_ai.input.messages")
# Names of the file, those of OTLP after them.
_IDS = ("span_id", "spanId")
_PARENTS = ("parent_span_id", "parentSpanId")
_TRACES = ("trace_id", "traceId")
_STARTS = ("start_time", "startTimeUnixNano")
_ENDS = ("end_time", "endTimeUnixNano")


@dataclass(frozen=True, slots=True)
class _Span:
    """A span: its place in the tree, its times in ns since 1970, and what a call recorded."""

    row: TraceRow
    name: str
    parent: str
    trace: str
    start_ns: int
    end_ns: int
    attributes: TraceRow

    @property
    def num_input(self) -> int:
        """Tokens of the prompt; 0 where the span is no call, or one that failed."""
        return _read_first_count(self.attributes, _INPUTS)

    @property
    def num_output(self) -> int:
        """Tokens of the answer; 0 where the span is no call, or one that failed."""
        return _read_first_count(self.attributes, _OUTPUTS)

    @property
    def is_call(self) -> bool:
        """Whether a model was asked, and answered."""
        return self.num_input > 0 and self.num_output > 0

    @property
    def text(self) -> str:
        """What the prompt was made of; empty where it was not recorded."""
        parts = [self.attributes.values[name] for name in _TEXTS if self.attributes.has(name)]
        return "\n".join(map(_canonical, parts))


@dataclass(slots=True)
class _Namer:
    """Names the blocks of prompts by their texts: equal beginnings, equal names."""

    chars_per_block: int
    names: NameTable = field(default_factory=NameTable)

    def name_blocks(self, text: str, num_tokens: int) -> tuple[int, ...]:
        """Return the names of the whole blocks of a prompt."""
        if not self.chars_per_block:
            return ()
        size = self.chars_per_block
        named: list[int] = []
        for place in range(min(len(text) // size, num_tokens // _BLOCK_TOKENS)):
            before = named[-1] if named else -1
            named.append(self.names.number((before, text[place * size : (place + 1) * size])))
        return tuple(named)


def _read(trace: TraceRows) -> TraceContent:
    spans = [span for row in trace.rows for span in _read_spans(row)]
    calls = [span for span in spans if span.is_call]
    if not calls:
        return TraceContent(())
    namer = _Namer(_count_chars(calls))
    sessions: defaultdict[str, list[_Span]] = defaultdict(list)
    for span in spans:
        sessions[span.trace].append(span)
    graph = CallGraph(_BLOCK_TOKENS)
    first_ns = min(call.start_ns for call in calls)
    for session in sessions.values():
        session_calls = [span for span in session if span.is_call]
        if session_calls:
            begin_ns = min(call.start_ns for call in session_calls)
            steps = _build_steps(session, namer, begin_ns)
            graph.add_session(steps, (begin_ns - first_ns) / _NS_PER_S)
    has_hashes = any(request.block_hashes for request in graph.requests)
    asked = [span for span in spans if any(span.attributes.has(name) for name in _INPUTS)]
    return TraceContent(
        tuple(graph.requests), _BLOCK_TOKENS if has_hashes else 0, len(asked) - len(calls)
    )


def _count_chars(calls: Sequence[_Span]) -> int:
    """Return how many characters a block has on average; 0 where no texts were recorded."""
    texts = [(len(call.text), call.num_input) for call in calls]
    num_chars = sum(length for length, _ in texts)
    num_tokens = sum(tokens for length, tokens in texts if length)
    return max(round(_BLOCK_TOKENS * num_chars / num_tokens), 1) if num_chars else 0


def _build_steps(spans: Sequence[_Span], namer: _Namer, begin_ns: int) -> list[Step]:
    """Return the steps of a session from the tree of its spans."""
    known = {span.name for span in spans}
    children: defaultdict[str, list[_Span]] = defaultdict(list)
    for span in spans:
        children[span.parent if span.parent in known else ""].append(span)
    return list(_steps_below("", children, namer, begin_ns))


def _steps_below(
    name: str, children: Mapping[str, Sequence[_Span]], namer: _Namer, begin_ns: int
) -> Iterator[Step]:
    for span in children.get(name, ()):
        below = list(_steps_below(span.name, children, namer, begin_ns)) if span.name else []
        start_s, end_s = (
            (time_ns - begin_ns) / _NS_PER_S for time_ns in (span.start_ns, span.end_ns)
        )
        if span.is_call:
            yield Call(
                start_s=start_s,
                end_s=end_s,
                num_prefill_tokens=span.num_input,
                num_decode_tokens=span.num_output,
                block_hashes=namer.name_blocks(span.text, span.num_input),
                model=_read_first(span.attributes, _MODELS),
            )
            yield from below
        elif below:
            yield Branch(
                start_s=min(step.start_s for step in below),
                end_s=max(end_s, *(step.end_s for step in below)),
                steps=below,
            )


def _read_spans(row: TraceRow) -> Iterator[_Span]:
    for item in _find_spans(row):
        attributes = item.values.get("attributes", {})
        if isinstance(attributes, list):
            attributes = {
                each.get("key"): next(iter(each.get("value", {}).values()), None)
                for each in attributes
                if isinstance(each, dict) and isinstance(each.get("value", {}), dict)
            }
        if not isinstance(attributes, dict):
            raise item.error(f"attributes: expected an object, found {attributes!r:.60}")
        start_ns, end_ns = _read_time(item, _STARTS), _read_time(item, _ENDS)
        yield _Span(
            row=item,
            name=_read_first(item, _IDS),
            parent=_read_first(item, _PARENTS),
            trace=_read_first(item, _TRACES) or f"{item.path} line {item.line}",
            start_ns=start_ns,
            end_ns=max(start_ns, end_ns),
            attributes=TraceRow(attributes, item.path, item.line),
        )


def _find_spans(row: TraceRow) -> Iterator[TraceRow]:
    """Return the spans of an object, wherever OTLP has them."""
    for name in ("resourceSpans", "scopeSpans"):
        for part in _objects(row, name):
            yield from _find_spans(part)
    yield from _objects(row, "spans")


def _objects(row: TraceRow, name: str) -> list[TraceRow]:
    items = row.values.get(name, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise row.error(f"{name}: expected a list of objects, found {items!r:.60}")
    return [TraceRow(item, row.path, row.line) for item in items]


def _read_time(item: TraceRow, names: Sequence[str]) -> int:
    """Return a time in ns since 1970: a date and time, or OTLP's number."""
    name = next((each for each in names if item.has(each)), names[0])
    value = item.values.get(name)
    if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
        return int(value)
    return item.read_timestamp(name)


def _read_first(row: TraceRow, names: Sequence[str]) -> str:
    return next((str(row.values[name]) for name in names if row.has(name)), "")


def _read_first_count(row: TraceRow, names: Sequence[str]) -> int:
    return next((row.read_count(name, 0) for name in names if row.has(name)), 0)


def _canonical(value: Any) -> str:
    """Return one text for a list of messages, whether it was recorded as JSON or as its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    if isinstance(value, list):
        # Each with a line of its own, so that more messages only add to the text.
        return "\n".join(json.dumps(item, sort_keys=True) for item in value)
    return json.dumps(value, sort_keys=True)


TRACE = TraceFormat(
    needs="JSON with spans of OpenTelemetry",
    matches=lambda columns, is_json: is_json and not columns.isdisjoint(("spans", "resourceSpans")),
    read=_read,
)
