"""Run a compiled simulation in slices and collect what it wrote."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import NamedTuple

import numpy as np

from foretoken.simulator import jit
from foretoken.simulator.cost_tables import CostTables
from foretoken.simulator.serving.fast import layout
from foretoken.simulator.serving.fast.kernel import run_slice
from foretoken.simulator.serving.fast.layout import Ints, Records
from foretoken.simulator.serving.fast.selection import SELECTS
from foretoken.simulator.serving.fast.state import FastState, build_state
from foretoken.simulator.serving.record import (
    RequestRecord,
    ServingRecord,
    StepRecord,
    TokenRuns,
)
from foretoken.simulator.serving.request_plan import RequestPlan
from foretoken.simulator.serving.setup import DeploymentSetup

_COLUMNS = tuple(column.name for column in fields(StepRecord) if column.default is MISSING)
_PREFILL_COLUMNS = tuple(name for name in _COLUMNS if name.startswith("prefill_"))
_STEP_COLUMNS = tuple(name for name in _COLUMNS if name not in _PREFILL_COLUMNS)


def run_fast(
    plan: RequestPlan,
    setup: DeploymentSetup,
    tables: CostTables,
    progress: Callable[[float], None],
) -> ServingRecord:
    """Return what the engines did with the requests; the setup must be one that is covered.

    Raises:
        RuntimeError: requests run that the scheduler does not schedule.

    """
    state = build_state(plan, setup, len(tables.tokens_us))
    slices: list[_Slice] = []
    while True:
        status = run_slice(state.record, tables)
        slices.append(_take_output(state))
        if status == layout.DONE:
            break
        if status == layout.STUCK:
            raise RuntimeError(f"{setup.profile.scheduler} does not schedule what runs")
        progress(state.record[0]["num_done"] / plan.num_requests)
    return ServingRecord(
        requests=_requests_of(state.arrays["requests"], plan),
        tokens=_runs_of(slices),
        steps=_steps_of(slices, setup.num_engines),
        num_kv_blocks=setup.num_kv_blocks,
        block_size=setup.profile.block_size,
    )


def is_ready(setup: DeploymentSetup) -> bool:
    """Whether what runs a deployment need not be compiled: that was done here or is kept."""
    return jit.is_ready(run_slice) and SELECTS[setup.profile.scheduler].is_ready


class _Slice(NamedTuple):
    """What was written in a slice: columns of the steps of each engine, by name, and token runs."""

    steps: list[dict[str, Ints]]
    runs: Records


def _take_output(state: FastState) -> _Slice:
    """Return a copy of what was written and make room."""
    arrays, record = state.arrays, state.record[0]
    steps = arrays["steps"][: record["num_out_steps"]]
    num_prefills = record["num_out_prefills"]
    prefills = {
        name: arrays["prefills"][name][:num_prefills] for name in ("engine", "step", "request")
    }
    for name in ("tokens", "context"):
        prefills[name] = arrays[f"prefill_{name}"][:num_prefills]
    taken = _Slice(
        steps=[_take_columns(steps, prefills, engine) for engine in range(len(arrays["engines"]))],
        runs=arrays["runs"][: record["num_out_runs"]].copy(),
    )
    record["num_out_steps"] = record["num_out_prefills"] = record["num_out_runs"] = 0
    return taken


def _take_columns(steps: Records, prefills: Mapping[str, Ints], engine: int) -> dict[str, Ints]:
    mine = np.flatnonzero(steps["engine"] == engine)
    its_prefills = np.flatnonzero(prefills["engine"] == engine)
    columns = {name: steps[name][mine] for name in _STEP_COLUMNS}
    for name in _PREFILL_COLUMNS:
        columns[name] = prefills[name.removeprefix("prefill_")][its_prefills]
    return columns


def _requests_of(requests: Records, plan: RequestPlan) -> RequestRecord:
    def column(name: str) -> Ints:
        return np.ascontiguousarray(requests[name])

    return RequestRecord(
        arrival_ns=column("arrival_ns"),
        queued_ns=column("queued_ns"),
        scheduled_ns=column("scheduled_ns"),
        first_token_ns=column("first_token_ns"),
        finished_ns=column("finished_ns"),
        num_prefill_tokens=column("num_prefill"),
        num_decode_tokens=column("num_decode"),
        num_preemptions=column("num_preemptions"),
        num_cached_tokens=column("num_cached"),
        num_loaded_tokens=np.zeros(len(requests), dtype=np.int32),
        engine=column("engine"),
        slo_class=plan.slo_class,
        outcome=column("outcome"),
    )


def _runs_of(slices: Sequence[_Slice]) -> TokenRuns:
    runs = np.concatenate([output.runs for output in slices])
    order = np.argsort(runs[:, 0], kind="stable")
    return TokenRuns(
        request=runs[order, 0],
        first_step=runs[order, 1],
        stride=runs[order, 2],
        count=runs[order, 3],
    )


def _steps_of(slices: Sequence[_Slice], num_engines: int) -> list[StepRecord]:
    """Return the steps of each engine; the slices give up theirs, column by column."""
    return [
        StepRecord(
            **{
                name: np.concatenate([output.steps[engine].pop(name) for output in slices])
                for name in _COLUMNS
            }
        )
        for engine in range(num_engines)
    ]
