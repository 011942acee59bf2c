"""A serving simulation as Arrow tables: its requests, the steps of its engines, its seconds.

docs/reference/serving-metrics.md lists the columns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from foretoken.domain.metrics.request import LATENCIES
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import REQUEST_OUTCOMES, SeriesColumns
from foretoken.domain.units import NS_PER_MS, NS_PER_S
from foretoken.simulator.cluster.fleet import FleetPool, count_stages, make_fleet
from foretoken.simulator.serving.metrics import (
    defined_latencies,
    execution_ns,
    instants_of,
    place_runs,
)
from foretoken.simulator.serving.occupancy import series_of
from foretoken.simulator.serving.record import NOT_REACHED, ServingRecord, StepRecord

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
    record: ServingRecord, scenario: ServingScenario, breakdowns: Sequence[Breakdown] = ()
) -> dict[str, pa.Table]:
    """Return the tables `requests`, `steps` and `series` of a run.

    `breakdowns` say where the time of steps went, one for each pool of the cluster or for the one
    kind of engines; without them the steps have no such columns.
    """
    return {
        "requests": requests_table(record, scenario),
        "steps": steps_table(record, scenario, breakdowns),
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
    moves = {
        "prefill_engine": _or_all(requests.prefill_engine, NOT_REACHED, requests.engine),
        "prefilled_s": _seconds(
            requests.first_token_ns if requests.prefilled_ns is None else requests.prefilled_ns
        ),
        "transferred_s": _seconds(
            _or_all(requests.transferred_ns, NOT_REACHED, requests.arrival_ns)
        ),
        "num_retries": _or_all(requests.num_retries, 0, requests.num_preemptions),
    }
    class_names = [*(item.name for item in scenario.slo_classes), ""]
    number = np.asarray(requests.slo_class)
    words = {
        "slo_class": _words(np.where(number < 0, len(class_names) - 1, number), class_names),
        "outcome": _words(np.asarray(requests.outcome), REQUEST_OUTCOMES),
    }
    latencies = _request_latencies(record, make_fleet(scenario, record))
    return pa.table({**times, **counts, **words, **moves, **latencies})


def steps_table(
    record: ServingRecord, scenario: ServingScenario, breakdowns: Sequence[Breakdown] = ()
) -> pa.Table:
    """Return one row per step, those of an engine in order and one engine after the other.

    Besides the columns of `StepRecord` it has the name of the engine's pool, the share of the KV
    blocks in use, the prompt tokens in the step, and where breakdowns are given `<group>_us` for
    the time of each operator group.
    """
    fleet = make_fleet(scenario, record)
    names = [pool.record.name for pool in fleet]
    parts = []
    for number, pool in enumerate(fleet):
        breakdown = breakdowns[number] if breakdowns else None
        for engine in pool.engines:
            part = _engine_steps(record.steps[engine], engine, pool, breakdown)
            words = _words(np.full(part.num_rows, number), names)
            parts.append(part.add_column(1, "pool", words))
    # A group that never ran on an engine takes no time there.
    joined = pa.concat_tables(parts, promote_options="default")
    columns = [
        column.fill_null(0.0) if column.null_count else column for column in joined.itercolumns()
    ]
    return pa.table(columns, names=joined.schema.names)


def series_table(record: ServingRecord, scenario: ServingScenario) -> pa.Table:
    """Return one row per second, or per so many where the run is very long: `SeriesColumns`."""
    columns = series_of(record, make_fleet(scenario, record))
    return pa.table({name: columns[name] for name in SeriesColumns.__dataclass_fields__})


def _engine_steps(
    steps: StepRecord, engine: int, pool: FleetPool, breakdown: Breakdown | None
) -> pa.Table:
    num_steps = len(steps.end_ns)
    prompts = np.bincount(steps.prefill_step, weights=steps.prefill_tokens, minlength=num_steps)
    columns: dict[str, Any] = {
        "engine": np.full(num_steps, engine, dtype=np.int32),
        **{
            f"{name}_s": np.asarray(getattr(steps, f"{name}_ns")) / NS_PER_S
            for name in ("scheduled", "start", "end", "seen")
        },
        **{name: np.asarray(getattr(steps, name)) for name in _STEP_COUNTS},
        "num_prefill_tokens": prompts.astype(np.int32),
        "kv_utilization_ratio": (
            np.asarray(steps.num_used_blocks) / max(pool.record.num_kv_blocks, 1)
        ).astype(np.float32),
    }
    if steps.num_output_tokens is not None:
        columns["num_output_tokens"] = np.asarray(steps.num_output_tokens)
    if breakdown is not None:
        columns |= {f"{name}_us": time_us for name, time_us in breakdown(steps).items()}
    return pa.table(columns)


def _request_latencies(record: ServingRecord, fleet: Sequence[FleetPool]) -> dict[str, pa.Array]:
    execution = execution_ns(record, place_runs(record), count_stages(fleet))
    times = instants_of(record.requests, execution)
    found = {
        metric.name: defined_latencies(metric.name, times)
        for metric in LATENCIES
        if "requests" in metric.shown
    }
    return {
        name: pa.array(values / NS_PER_MS, mask=~is_defined)
        for name, (values, is_defined) in found.items()
    }


def _seconds(times_ns: NDArray[np.integer]) -> NDArray[np.float64]:
    times = np.asarray(times_ns)
    return np.asarray(np.where(times < 0, -1.0, times / NS_PER_S))


def _or_all(column: NDArray[np.integer] | None, value: int, like: Any) -> NDArray[np.integer]:
    """Return a column, or one of a value where there is none, as long and wide as another."""
    return np.full_like(np.asarray(like), value) if column is None else np.asarray(column)


def _words(numbers: NDArray[np.integer], words: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32)), list(words))
