"""Files of measured training steps: which format one is in, and what was measured."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.training.measured_file import STEP, MeasuredTime, read_measured
from foretoken.simulator.validation import training_truth_table
from foretoken.simulator.validation.training_run import (
    ALL_STAGES,
    MeasuredComponent,
    MeasuredTraining,
)


def read_run(path: Path, name: str = "") -> MeasuredTraining:
    """Return the measured steps in a file or folder; `name` says of which configuration.

    The table `truth.csv` of GPUModeling25 is known by its columns, with a `steps.csv` beside it if
    there is one; a folder means that table in it. All else is read as `read_measured` does:
    a CSV, JSON or YAML table with `scenario`, `component`, `stage`, `time_ms` and `flags`, of which
    only `time_ms` is needed. Repeated rows are single steps: their median counts.

    Raises:
        InvalidRequestError: it cannot be read, has no unflagged step, or not this configuration.

    """
    table = path / training_truth_table.FILE_NAME if path.is_dir() else path
    if training_truth_table.recognises(table):
        return training_truth_table.read_truth(table, name)
    return _collect(table, _of_scenario(table, read_measured(table), name), name or table.stem)


def _of_scenario(path: Path, rows: Sequence[MeasuredTime], name: str) -> Sequence[MeasuredTime]:
    named = sorted({row.scenario for row in rows if row.scenario})
    if not named or (len(named) == 1 and not name):
        return rows
    chosen = [row for row in rows if row.scenario in (name, "")]
    if not any(row.scenario == name for row in chosen):
        _refuse(path, f"has no times of the scenario {name!r}; it has {', '.join(named)}")
    return chosen


def _collect(path: Path, rows: Iterable[MeasuredTime], name: str) -> MeasuredTraining:
    by_part: dict[tuple[str, int], list[MeasuredTime]] = defaultdict(list)
    for row in rows:
        by_part[row.component, row.stage].append(row)
    steps = [row for (component, _), part in by_part.items() for row in part if component == STEP]
    step = _component(STEP, ALL_STAGES, steps)
    if step is None or step.flags:
        _refuse(path, f"has no time of a whole step of {name} without a flag (component `{STEP}`)")
    components = [
        _component(component, stage, part)
        for (component, stage), part in by_part.items()
        if component != STEP
    ]
    return MeasuredTraining(
        name=name,
        source="measured times",
        step=step,
        components=tuple(item for item in components if item is not None),
        num_flagged_steps=sum(bool(row.flags) for row in steps),
    )


def _component(name: str, stage: int, rows: Sequence[MeasuredTime]) -> MeasuredComponent | None:
    """Return the component of its rows; of the flagged ones only where there is no other."""
    if not rows:
        return None
    good = [row for row in rows if not row.flags]
    used = good or rows
    times = tuple(row.time_ms for row in used)
    return MeasuredComponent(
        name=name,
        stage=stage,
        time_ms=statistics.median(times),
        mean_ms=statistics.fmean(times),
        samples_ms=times if len(times) > 1 else (),
        flags="" if good else "; ".join(dict.fromkeys(row.flags for row in rows)),
    )


def _refuse(path: Path, problem: str) -> NoReturn:
    raise InvalidRequestError.of_field("--measured", f"{path}: {problem}")
