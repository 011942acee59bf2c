"""A serving simulation as Arrow tables: its requests, the steps of its engines, its seconds.

docs/reference/serving-metrics.md lists the columns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretoken.domain.report import REQUEST_OUTCOMES, SeriesColumns
from foretoken.domain.scenario import ServingScenario
from foretoken.domain.units import NS_PER_MS, NS_PER_S
from foretoken.simulator.serving.efficiency import mean_power_w
from foretoken.simulator.serving.metrics import (
    execution_ns,
    is_completed,
    place_runs,
    tpot_ns,
)
from foretoken.simulator.serving.occupancy import series_of
from foretoken.simulator.serving.record import ServingRecord, StepRecord

# The time of each step of an engine in µs by operator group; a key `stage_<number>` is the time of
# a pipeline stage instead.
Breakdown = Callable[[StepRecord], Mapping[str, NDArray[np.float64]]]

# Counts of a step that travel as they are.
_STEP_COUNTS = (
    "num_tokens",
    "num_rows",
    "num_decodes",
    "num_prefills",
    "decode_kv_tokens",
    "decode_kv_tokens_max",
    "num_running",
    "num_waiting",
    "num_used_blocks",
    "num_preempted",
)


def build_tables(
    record: ServingRecord, scenario: ServingScenario, breakdown: Breakdown | None = None
) -> dict[str, pa.Table]:
    """Return the tables `requests`, `steps` and `series` of a run.

    `breakdown` says where the time of steps went; without it the steps have no such columns.
    """
    return {
        "requests": requests_table(record, scenario),
        "steps": steps_table(record, breakdown),
        "series": series_table(record, scenario),
    }


def requests_table(record: ServingRecord, scenario: ServingScenario) -> pa.Table:
    """Return one row per request in order of arrival: `RequestColumns`, then its latencies.

    A latency that is not defined is null: of requests that did not complete, or the time per token
    of an answer of one.
    """
    requests = record.requests
    times = {
        f"{name}_s": _seconds(getattr(requests, f"{name}_ns"))
        for name in ("arrival", "queued", "scheduled", "first_token", "finished")
    }
    counts = {
        name: np.asarray(getattr(requests, name))
        for name in (
            "num_prefill_tokens",
            "num_decode_tokens",
            "num_preemptions",
            "num_cached_tokens",
            "num_loaded_tokens",
            "engine",
        )
    }
    class_names = [*(item.name for item in scenario.slo_classes), ""]
    number = np.asarray(requests.slo_class)
    words = {
        "slo_class": _words(np.where(number < 0, len(class_names) - 1, number), class_names),
        "outcome": _words(np.asarray(requests.outcome), REQUEST_OUTCOMES),
    }
    return pa.table({**times, **counts, **words, **_request_latencies(record, scenario.layout.pp)})


def steps_table(record: ServingRecord, breakdown: Breakdown | None = None) -> pa.Table:
    """Return one row per step, those of an engine in order and one engine after the other.

    Beside the columns of `StepRecord` it has the share of the KV blocks in use, the prompt tokens
    in the step, and where the breakdown is given `<group>_us` for the time of each operator group.
    """
    parts = [_engine_steps(record, engine, breakdown) for engine in range(len(record.steps))]
    # A group that never ran on an engine takes no time there.
    joined = pa.concat_tables(parts, promote_options="default")
    columns = [
        column.fill_null(0.0) if column.null_count else column for column in joined.itercolumns()
    ]
    return pa.table(columns, names=joined.schema.names)


def series_table(record: ServingRecord, scenario: ServingScenario) -> pa.Table:
    """Return one row per second, or per so many where the run is very long: `SeriesColumns`."""
    columns: dict[str, Any] = dict(series_of(record, scenario.layout.pp))
    columns["power_w"] = mean_power_w(scenario, columns["utilization_ratio"])
    return pa.table({name: columns[name] for name in SeriesColumns.__dataclass_fields__})


def _engine_steps(record: ServingRecord, engine: int, breakdown: Breakdown | None) -> pa.Table:
    steps = record.steps[engine]
    num_steps = len(steps.end_ns)
    prompts = np.bincount(steps.prefill_step, weights=steps.prefill_tokens, minlength=num_steps)
    columns: dict[str, Any] = {
        "engine": np.full(num_steps, engine, dtype=np.int32),
        **{
            f"{name}_s": np.asarray(getattr(steps, f"{name}_ns")) / NS_PER_S
            for name in ("scheduled", "start", "end")
        },
        **{name: np.asarray(getattr(steps, name)) for name in _STEP_COUNTS},
        "num_prefill_tokens": prompts.astype(np.int32),
        "kv_utilization_ratio": (
            np.asarray(steps.num_used_blocks) / max(record.num_kv_blocks, 1)
        ).astype(np.float32),
    }
    if breakdown is not None:
        columns |= {f"{name}_us": time_us for name, time_us in breakdown(steps).items()}
    return pa.table(columns)


def _request_latencies(record: ServingRecord, num_stages: int) -> dict[str, pa.Array]:
    requests = record.requests
    done = is_completed(requests)
    arrival, queued, scheduled, first, finished = (
        np.asarray(getattr(requests, f"{name}_ns"))
        for name in ("arrival", "queued", "scheduled", "first_token", "finished")
    )
    execution = execution_ns(record, place_runs(record), num_stages)
    tpot = tpot_ns(requests)
    times_ns = {
        "ttft_ms": (first - arrival, done),
        "ttft_queued_ms": (first - queued, done),
        "tpot_ms": (tpot, ~np.isnan(tpot)),
        "e2e_latency_ms": (finished - arrival, done),
        "queueing_ms": (scheduled - arrival, scheduled >= 0),
        "execution_ms": (execution, done),
        "preempted_ms": (np.maximum(finished - scheduled - execution, 0), done),
    }
    return {
        name: pa.array(values / NS_PER_MS, mask=~defined)
        for name, (values, defined) in times_ns.items()
    }


def _seconds(times_ns: NDArray[np.integer]) -> NDArray[np.float64]:
    times = np.asarray(times_ns)
    return np.asarray(np.where(times < 0, -1.0, times / NS_PER_S))


def _words(numbers: NDArray[np.integer], words: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32)), list(words))
