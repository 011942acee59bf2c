"""A training step as a trace for Perfetto or chrome://tracing."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from foretoken.domain.results.training_report import SPAN_KINDS, MemoryColumns, TrainingReport
from foretoken.domain.units import GIB, US_PER_MS
from foretoken.simulator.report.training_streams import SpanArrays, assign_lanes, span_arrays

Event = dict[str, Any]

_STREAMS = ("compute", "communication")


def chrome_trace(report: TrainingReport) -> dict[str, Any]:
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


def _name(pid: int, kind: str, name: str, tid: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
