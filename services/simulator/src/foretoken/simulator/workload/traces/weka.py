"""Agents as Weka's kv-cache-tester and AgentX record them: an object for each agent's session.

`requests` are calls (`type` `s` or `n`; `t` in s from the session's begin, `api_time` how long it
took, `in`, `out`, `hash_ids` of `block_size` tokens) and agents that were sent out (`subagent`,
with `requests` of their own). Times of these count from the `t` of their agent, as recorded, or
from the session's begin, as AgentX publishes them: the first ones tell. Calls without `api_time`
are taken to end when they begin: the time to the next one then holds the answer. Hashes are names
within a session, or of the file where `hash_id_scope` is `global`.
Source: github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md; AIPerf,
docs/tutorials/weka-trace.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from foretoken.simulator.workload.call_graph import Branch, Call, CallGraph, Step
from foretoken.simulator.workload.trace import (
    NameTable,
    TraceContent,
    TraceFormat,
    TraceRow,
    TraceRows,
    read_hashes,
)

_BLOCK_TOKENS = 64
_MS_PER_S = 1000.0


@dataclass(slots=True)
class _Reader:
    block_tokens: int
    names: NameTable = field(default_factory=NameTable)
    num_skipped: int = 0

    def read_session(self, row: TraceRow) -> list[Step]:
        """Return the steps of a session's main agent."""
        agents = [item for item in _items(row) if _is_agent(item)]
        scope = "" if row.values.get("hash_id_scope") == "global" else f"line {row.line} {row.path}"
        # Those that count from the session's begin are not nearer to it than to their agent's.
        are_relative = any(
            call.read_seconds("t") < agent.read_seconds("t") / 2
            for agent in agents
            for call in _items(agent)[:1]
        )
        return list(self._read_steps(row, scope, 0.0, are_relative=are_relative))

    def _read_steps(
        self, row: TraceRow, scope: str, begin_s: float, *, are_relative: bool
    ) -> Iterator[Step]:
        for item in _items(row):
            time_s = item.read_seconds("t")
            start_s = begin_s + time_s if are_relative else max(begin_s, time_s)
            if _is_agent(item):
                steps = list(self._read_steps(item, scope, start_s, are_relative=are_relative))
                if steps:
                    end_s = max(step.end_s for step in steps)
                    if item.has("duration_ms"):
                        end_s = max(end_s, start_s + item.read_seconds("duration_ms", _MS_PER_S))
                    yield Branch(start_s=start_s, end_s=end_s, steps=steps)
            elif item.read_count("in", 0) == 0 or item.read_count("out", 0) == 0:
                self.num_skipped += 1
            else:
                yield self._read_call(item, scope, start_s)

    def _read_call(self, item: TraceRow, scope: str, start_s: float) -> Call:
        num_prompt = item.read_count("in")
        hashes = read_hashes(item, "hash_ids", self.names, scope)
        took_s = item.read_seconds("api_time") if item.has("api_time") else 0.0
        return Call(
            start_s=start_s,
            end_s=start_s + took_s,
            num_prefill_tokens=num_prompt,
            num_decode_tokens=item.read_count("out"),
            block_hashes=hashes[: -(-num_prompt // self.block_tokens)],
            model=str(item.values.get("model", "")),
        )


def _is_agent(item: TraceRow) -> bool:
    return item.values.get("type") == "subagent"


def _items(row: TraceRow) -> list[TraceRow]:
    items = row.values.get("requests", [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise row.error(f"requests: expected a list of objects, found {items!r:.60}")
    return [TraceRow(item, row.path, row.line) for item in items]


def _read(trace: TraceRows) -> TraceContent:
    trace.require("requests")
    reader: _Reader | None = None
    graph = CallGraph(_BLOCK_TOKENS)
    for row in trace.rows:
        block_tokens = row.read_count("block_size") if row.has("block_size") else _BLOCK_TOKENS
        if reader is None:
            reader, graph = _Reader(block_tokens), CallGraph(block_tokens)
        elif block_tokens != reader.block_tokens:
            raise row.error(
                f"block_size: {block_tokens}, in the sessions before {reader.block_tokens}"
            )
        graph.add_session(reader.read_session(row), 0.0)
    has_hashes = any(request.block_hashes for request in graph.requests)
    return TraceContent(
        tuple(graph.requests),
        graph.hash_block_tokens if has_hashes else 0,
        reader.num_skipped if reader else 0,
    )


TRACE = TraceFormat(
    needs="JSON with requests of t, type, in, out",
    matches=lambda columns, is_json: is_json and "requests" in columns,
    read=_read,
)
