"""Simulated runs and steps as traces for Perfetto or chrome://tracing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretoken.domain.results.training_report import SPAN_KINDS, MemoryColumns, TrainingReport
from foretoken.domain.units import GIB, US_PER_MS, US_PER_S
from foretoken.simulator.training.stream_spans import (
    SpanArrays,
    assign_lanes,
    pick_lanes,
    span_arrays,
)

Event = dict[str, Any]
Columns = Mapping[str, NDArray[Any]]

_STREAMS = ("compute", "communication")
# A viewer stays quick up to about so many events.
_MAX_STEPS = 20_000
_MAX_REQUESTS = 1_000

# What a step's box says when it is asked.
_STEP_ARGUMENTS = (
    "num_tokens",
    "num_decodes",
    "num_prefills",
    "num_prefill_tokens",
    "decode_kv_tokens",
    "num_preempted",
)
# The curves above an engine's steps.
_COUNTERS = {
    "requests": {"running": "num_running", "waiting": "num_waiting"},
    "KV blocks": {"used": "num_used_blocks"},
    "batch": {"tokens": "num_tokens"},
}
# The parts of a request's life, each from one column of its table to another.
_LIFE = (
    ("frontend", "arrival_s", "queued_s"),
    ("queued", "queued_s", "scheduled_s"),
    ("prefill", "scheduled_s", "prefilled_s"),
    ("decode", "prefilled_s", "finished_s"),
)
# The last part of one whose KV cache moved to another engine.
_LIFE_AFTER_TRANSFER = (
    ("transfer", "prefilled_s", "transferred_s"),
    ("decode", "transferred_s", "finished_s"),
)
_REQUESTS_PID = 0
# Handing tokens out takes less of a step than this; two pipeline stages overlap by half of it.
_MAX_OUTPUT_SHARE = 0.25


def training_trace(report: TrainingReport) -> dict[str, Any]:
    """Return the trace as JSON data: a process per pipeline rank, all of its chunks included.

    Each has a thread for its computation, one for its communication (more where two passes or
    several transfers overlap), and a curve of its allocated memory in GiB.

    Source: Trace Event Format; complete (X), counter (C) and metadata (M) events, times in µs.
    """
    spans = span_arrays(report.spans)
    events = [
        event
        for stage in spans.stages
        for event in _stage_events(stage, spans.pick(spans.stage == stage))
    ]
    return {
        "traceEvents": [*events, *_memory_events(report.memory_timeline)],
        "displayTimeUnit": "ms",
    }


def _stage_events(stage: int, spans: SpanArrays) -> Iterator[Event]:
    yield _name(stage, "process_name", f"stage {stage}")
    yield {**_name(stage, "process_sort_index", ""), "args": {"sort_index": stage}}
    streams = (~spans.is_compute).tolist()
    threads = [
        len(_STREAMS) * lane + stream
        for lane, stream in zip(assign_lanes(spans), streams, strict=True)
    ]
    for thread in sorted({*range(len(_STREAMS)), *threads}):
        lane, stream = divmod(thread, len(_STREAMS))
        name = f"{_STREAMS[stream]} {lane + 1}" if lane else _STREAMS[stream]
        yield _name(stage, "thread_name", name, thread)
    columns = (spans.kind, spans.micro_batch, spans.chunk, spans.start_ms, spans.end_ms)
    for thread, kind, micro_batch, chunk, start_ms, end_ms in zip(
        threads, *(column.tolist() for column in columns), strict=True
    ):
        word = SPAN_KINDS[kind]
        yield {
            "ph": "X",
            "name": word if micro_batch < 0 else f"{word} {micro_batch}",
            "cat": word,
            "pid": stage,
            "tid": thread,
            "ts": start_ms * US_PER_MS,
            "dur": (end_ms - start_ms) * US_PER_MS,
            "args": {"micro_batch": micro_batch, "chunk": chunk},
        }


def _memory_events(memory: MemoryColumns) -> Iterator[Event]:
    columns = (memory.stage, memory.time_ms, memory.bytes)
    for stage, time_ms, held in zip(
        *(np.asarray(column).tolist() for column in columns), strict=True
    ):
        yield {
            "ph": "C",
            "name": "memory (GiB)",
            "pid": int(stage),
            "ts": time_ms * US_PER_MS,
            "args": {"allocated": held / GIB},
        }


def serving_trace(
    steps: pa.Table,
    requests: pa.Table,
    *,
    max_requests: int = _MAX_REQUESTS,
    max_steps: int = _MAX_STEPS,
) -> dict[str, Any]:
    """Return the trace as JSON data, from the tables of a run.

    A process per engine: a thread per pipeline stage with its steps, and counters of requests,
    blocks and tokens. One more process has the first `max_requests` requests as asynchronous spans.
    Without `stage_<number>_us` columns the steps of a pipeline are drawn whole, in as many threads
    as overlap. Only the first `max_steps` steps are drawn.

    Source: Trace Event Format; complete (X), counter (C), asynchronous (b, e) and metadata (M)
    events, times in µs.
    """
    events: list[Event] = []
    engines = np.asarray(steps.column("engine"))
    numbers = np.unique(engines)
    for engine in numbers.tolist():
        first, last = np.searchsorted(engines, (engine, engine + 1))
        num_drawn = min(int(last - first), max(1, max_steps // len(numbers)))
        drawn = steps.slice(int(first), num_drawn)
        pool = str(drawn.column("pool")[0]) if num_drawn else ""
        events += _engine_events(int(engine) + 1, pool, _columns(drawn.drop_columns("pool")))
    if requests.num_rows:
        events += _request_events(requests.slice(0, max_requests))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _columns(table: pa.Table) -> Columns:
    return {name: table.column(name).to_numpy() for name in table.schema.names}


def _engine_events(pid: int, pool: str, columns: Columns) -> Iterator[Event]:
    yield _name(pid, "process_name", f"{pool} engine {pid - 1}".strip())
    stages = _stage_spans(columns)
    word = "stage" if len(_stage_names(columns)) > 1 else "lane"
    sizes = columns["num_decodes"] + columns["num_prefills"]
    kinds = np.where(columns["num_prefills"] == 0, "decode", "prefill")
    kinds[(columns["num_prefills"] > 0) & (columns["num_decodes"] > 0)] = "mixed"
    arguments = {name: columns[name].tolist() for name in _STEP_ARGUMENTS}
    for stage, (starts, ends) in enumerate(stages):
        name = f"{word} {stage}" if len(stages) > 1 else "steps"
        yield _name(pid, "thread_name", name, stage)
        drawn = np.flatnonzero(ends > starts)
        for step in drawn.tolist():
            yield {
                "ph": "X",
                "name": f"{kinds[step]} {sizes[step]}",
                "cat": str(kinds[step]),
                "pid": pid,
                "tid": stage,
                "ts": float(starts[step]),
                "dur": float(ends[step] - starts[step]),
                "args": {"step": step, **{name: arguments[name][step] for name in arguments}},
            }
    yield from _counter_events(pid, columns)


def _stage_names(columns: Columns) -> Sequence[str]:
    return [name for name in columns if name.startswith("stage_") and name.endswith("_us")]


def _stage_spans(columns: Columns) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the starts and ends in µs of what each thread shows; equal where it shows nothing."""
    start, end = columns["start_s"] * US_PER_S, columns["end_s"] * US_PER_S
    times = [columns[name] for name in _stage_names(columns)]
    if len(times) > 1:
        return _follow_stages(start, times)
    end = _clip_output(start, end)
    lanes = np.array(pick_lanes(start, end), dtype=np.int64)
    return [
        (start, np.where(lanes == lane, end, start))
        for lane in range(int(lanes.max(initial=0)) + 1)
    ]


def _follow_stages(
    start: NDArray[np.float64], times: Sequence[NDArray[np.float64]]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return when each stage works on each step: after the stage before it and its own last one."""
    spans = []
    ready = start
    for time_us in times:
        ends = np.empty_like(start)
        free = 0.0
        for step, (earliest, duration) in enumerate(
            zip(ready.tolist(), time_us.tolist(), strict=True)
        ):
            free = max(free, earliest) + duration
            ends[step] = free
        spans.append((ends - time_us, ends))
        ready = ends
    return spans


def _clip_output(start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ends of steps on the device where one stage hands tokens out behind the next step.

    Steps of a pipeline overlap by about as much as they take, and stay as they are.
    """
    following = np.append(start[1:], np.inf)
    overlap = np.maximum(end - following, 0)
    is_output = np.median(overlap) <= _MAX_OUTPUT_SHARE * np.median(end - start)
    return np.minimum(end, following) if is_output else end


def _counter_events(pid: int, columns: Columns) -> Iterator[Event]:
    times = (columns["scheduled_s"] * US_PER_S).tolist()
    for name, parts in _COUNTERS.items():
        values = {label: columns[column].tolist() for label, column in parts.items()}
        for step, time_us in enumerate(times):
            now = {label: numbers[step] for label, numbers in values.items()}
            yield {"ph": "C", "name": name, "pid": pid, "ts": time_us, "args": now}


def _request_events(requests: pa.Table) -> Iterator[Event]:
    yield _name(_REQUESTS_PID, "process_name", "requests")
    for number, row in enumerate(requests.to_pylist()):
        # Older results lack the column.
        row.setdefault("prefilled_s", row["first_token_s"])
        life = _LIFE if row["transferred_s"] < 0 else (*_LIFE[:-1], *_LIFE_AFTER_TRANSFER)
        parts = [part for part in life if 0 <= row[part[1]] < row[part[2]]]
        if not parts:
            continue
        arguments = {
            name: row[name]
            for name in (
                "num_prefill_tokens",
                "num_decode_tokens",
                "prefill_engine",
                "engine",
                "num_preemptions",
                "num_retries",
            )
        }
        common = {"cat": "request", "id": number, "pid": _REQUESTS_PID, "tid": 0}
        whole = {"name": f"request {number}", **common}
        # Of events at one instant the viewers take the file's order: the whole encloses its parts.
        yield {"ph": "b", "ts": row[parts[0][1]] * US_PER_S, "args": arguments, **whole}
        for name, begin, end in parts:
            yield {"ph": "b", "ts": row[begin] * US_PER_S, "args": {}, "name": name, **common}
            yield {"ph": "e", "ts": row[end] * US_PER_S, "args": {}, "name": name, **common}
        yield {"ph": "e", "ts": row[parts[-1][2]] * US_PER_S, "args": {}, **whole}


def _name(pid: int, kind: str, name: str, tid: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
