"""Read measured steps in the layout of GPUModeling25's ground truth.

`truth.csv` has a row per job, component and stage with the mean over the fastest profiled step and
over all of them, `steps.csv` beside it a row per step. Times of the first table are in µs.

Source: Littlesnakess/GPUModeling25, `best_batch/module_times_average.csv` and the jobs' logs.
"""

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.validation.training_run import (
    ALL_STAGES,
    MeasuredComponent,
    MeasuredTraining,
)

FILE_NAME = "truth.csv"

_STEPS_NAME = "steps.csv"
_COLUMNS = ("config_id", "job_id", "component", "stage", "best_avg_us", "pp")
_WHOLE_STEP = "train_batch"
# Their name of a component, by ours; all other names are the same.
_NAMES = {"optimizer_step": "optimizer"}
# Flags that say nothing against a value.
_HARMLESS = frozenset({"wait_free"})
# A step that takes longer than this many medians starts the run up, or writes a profile out.
_FAR_RATIO = 2.0

_Row = Mapping[str, str]


def recognises(path: Path) -> bool:
    """Tell whether a file is such a table, by its columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    return set(_COLUMNS) <= set(header)


def read_truth(path: Path, name: str = "") -> MeasuredTraining:
    """Return what was measured of one configuration, `config_id` or `config_id/job_id`.

    Of several jobs of a configuration the one in the paper counts (`paper_run`). An empty name
    means the only configuration there is.

    Raises:
        InvalidRequestError: not one configuration of that name, or a value that is no number.

    """
    if not recognises(path):
        _refuse(path, f"cannot be read, or has not the columns {', '.join(_COLUMNS)}")
    rows = _choose(path, _read(path), name)
    first = rows[0]
    steps = _read_steps(path, first)
    fastest = _fastest_step(path, rows)
    good = tuple(time_ms for time_ms, problem in steps if not problem)
    if good and _skipped_update(fastest.time_ms, steps):
        # The fastest step found an overflow and did less than the others.
        fastest_ms, mean_ms = statistics.median(good), statistics.fmean(good)
    else:
        fastest_ms, mean_ms = fastest.time_ms, fastest.mean_ms
    return MeasuredTraining(
        name=first["config_id"],
        source=f"GPUModeling25, job {first['job_id']}",
        step=MeasuredComponent(
            name="step", stage=ALL_STAGES, time_ms=fastest_ms, mean_ms=mean_ms, samples_ms=good
        ),
        components=tuple(_component(path, row) for row in rows if row["component"] != _WHOLE_STEP),
        num_flagged_steps=len(steps) - len(good),
    )


def _choose(path: Path, rows: Sequence[_Row], name: str) -> Sequence[_Row]:
    config, _, job = name.partition("/")
    configs = sorted({row["config_id"] for row in rows})
    if config not in configs:
        if len(configs) != 1 or job:
            known = ", ".join(configs)
            _refuse(path, f"which configuration? It has {known}; the scenario's name is {name!r}")
        config = configs[0]
    chosen = [row for row in rows if row["config_id"] == config]
    jobs = list(dict.fromkeys(row["job_id"] for row in chosen))
    if job and job not in jobs:
        _refuse(path, f"{config} has the jobs {', '.join(jobs)}, not {job}")
    published = [row["job_id"] for row in chosen if row.get("paper_run") == "1"]
    job = job or next(iter(published), jobs[0])
    return [row for row in chosen if row["job_id"] == job]


def _fastest_step(path: Path, rows: Sequence[_Row]) -> MeasuredComponent:
    whole = [_component(path, row) for row in rows if row["component"] == _WHOLE_STEP]
    if not whole:
        _refuse(path, f"{rows[0]['config_id']} has no {_WHOLE_STEP}")
    # Every stage timed the same step.
    return MeasuredComponent(
        name="step",
        stage=ALL_STAGES,
        time_ms=statistics.median(item.time_ms for item in whole),
        mean_ms=statistics.median(item.mean_ms for item in whole),
    )


def _component(path: Path, row: _Row) -> MeasuredComponent:
    time_ms = _number(path, row, "best_avg_us") / US_PER_MS
    has_mean = bool(row.get("prof_avg_us"))
    num_stages = int(_number(path, row, "pp"))
    stage = {"first": 0, "middle": 1, "last": num_stages - 1}.get(row["stage"])
    if stage is None:
        _refuse(path, f"expected the stage first, middle or last, found {row['stage']!r}")
    flags = [flag for flag in row.get("flags", "").split(";") if flag and flag not in _HARMLESS]
    return MeasuredComponent(
        name=_NAMES.get(row["component"], row["component"]),
        stage=stage,
        time_ms=time_ms,
        mean_ms=_number(path, row, "prof_avg_us") / US_PER_MS if has_mean else time_ms,
        flags="; ".join(flags),
    )


def _read_steps(path: Path, job: _Row) -> list[tuple[float, str]]:
    """Return the ms of each step of a job, with what speaks against it; none without the file."""
    table = path.parent / _STEPS_NAME
    if not table.is_file():
        return []
    rows = [
        row
        for row in _read(table)
        if (row["config_id"], row["job_id"]) == (job["config_id"], job["job_id"])
    ]
    times = [_number(table, row, "elapsed_ms") for row in rows]
    middle = statistics.median(times) if times else 0.0
    return list(_judge_steps(rows, times, middle))


def _judge_steps(
    rows: Sequence[_Row], times: Sequence[float], middle: float
) -> Iterator[tuple[float, str]]:
    for index, (row, time_ms) in enumerate(zip(rows, times, strict=True)):
        problem = ""
        if row.get("overflow_skipped") == "1":
            problem = "update skipped"
        elif index == 0 or time_ms > _FAR_RATIO * middle:
            problem = "starts up or writes a profile"
        yield time_ms, problem


def _skipped_update(step_ms: float, steps: Sequence[tuple[float, str]]) -> bool:
    """Tell whether the step of that time is one that skipped its update."""
    nearest = min(steps, key=lambda step: abs(step[0] - step_ms))
    return nearest[1] == "update skipped"


def _read(path: Path) -> list[_Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        _refuse(path, str(err))


def _number(path: Path, row: _Row, column: str) -> float:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError, OverflowError):
        _refuse(path, f"{column} of {row.get('component', 'a step')} is no number")


def _refuse(path: Path, problem: str) -> NoReturn:
    raise InvalidRequestError.of_field("--measured", f"{path}: {problem}")
