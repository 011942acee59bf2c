"""What a compiled simulation wrote: taken out piece by piece, joined in the end."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import NamedTuple

import numpy as np

from foretoken.simulator.engine.layout import Ints, Records
from foretoken.simulator.engine.state import EngineState
from foretoken.simulator.serving.record import StepRecord, TokenRuns
from foretoken.simulator.serving.setup import DeploymentSetup

_COLUMNS = (
    *(column.name for column in fields(StepRecord) if column.default is MISSING),
    "num_output_tokens",
    "delivered_ns",
)
PREFILL_COLUMNS = tuple(name for name in _COLUMNS if name.startswith("prefill_"))
_STEP_COLUMNS = tuple(name for name in _COLUMNS if name not in PREFILL_COLUMNS)
# Of a request, the token run that goes on: `RUN_COLUMNS` but the first.
_OPEN_RUN_FIELDS = ("run_first", "run_stride", "run_count", "engine", "attempt")


class Slice(NamedTuple):
    """What was written in a slice: columns of the steps of each engine, by name, and token runs."""

    steps: list[dict[str, Ints]]
    runs: Records


def take_output(state: EngineState) -> Slice:
    """Return a copy of what was written and make room."""
    arrays, record = state.arrays, state.record[0]
    steps = arrays["steps"][: record["num_out_steps"]]
    num_prefills = record["num_out_prefills"]
    prefills = {
        name: arrays["prefills"][name][:num_prefills] for name in ("engine", "step", "request")
    }
    for name in ("tokens", "context"):
        prefills[name] = arrays[f"prefill_{name}"][:num_prefills]
    taken = Slice(
        steps=[_take_columns(steps, prefills, engine) for engine in range(len(arrays["engines"]))],
        runs=arrays["runs"][: record["num_out_runs"]].copy(),
    )
    record["num_out_steps"] = record["num_out_prefills"] = record["num_out_runs"] = 0
    return taken


def _take_columns(steps: Records, prefills: Mapping[str, Ints], engine: int) -> dict[str, Ints]:
    mine = np.flatnonzero(steps["engine"] == engine)
    its_prefills = np.flatnonzero(prefills["engine"] == engine)
    columns = {name: steps[name][mine] for name in _STEP_COLUMNS}
    for name in PREFILL_COLUMNS:
        columns[name] = prefills[name.removeprefix("prefill_")][its_prefills]
    return columns


def join_slices(slices: Sequence[Slice]) -> Slice:
    """Return what was written in all; the slices give up theirs, column by column."""
    return Slice(
        steps=[
            {
                name: np.concatenate([output.steps[engine].pop(name) for output in slices])
                for name in _COLUMNS
            }
            for engine in range(len(slices[0].steps))
        ],
        runs=np.concatenate([output.runs for output in slices]),
    )


def step_records(output: Slice, setup: DeploymentSetup) -> list[StepRecord]:
    """Return the steps of each engine.

    What left them, and when it was handed out, is kept where that are not its rows and its end.
    """
    profile = setup.profile
    are_rows = setup.speculation is None
    are_ends = profile.output_us_per_seq == profile.output_us_per_past_token == 0
    unseen = {"num_output_tokens"} if are_rows else set()
    unseen |= {"delivered_ns"} if are_ends else set()
    return [
        StepRecord(**{name: columns[name] for name in columns if name not in unseen})
        for columns in output.steps
    ]


def open_runs(requests: Records, which: Ints) -> Ints:
    """Return the token runs of some requests that go on, as rows of `RUN_COLUMNS`."""
    return np.stack([which, *(requests[name][which] for name in _OPEN_RUN_FIELDS)], axis=1)


def token_runs(runs: Records) -> TokenRuns:
    """Return token runs by request; those of a request in the order they are in."""
    order = np.argsort(runs[:, 0], kind="stable")
    return TokenRuns(
        request=runs[order, 0],
        first_step=runs[order, 1],
        stride=runs[order, 2],
        count=runs[order, 3],
        engine=runs[order, 4],
    )
