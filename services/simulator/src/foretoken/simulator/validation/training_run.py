"""Measured training steps: whole steps and their components, and the files that have them.

`truth.csv` of GPUModeling25 has a row per job, component and stage with the mean over the fastest
profiled step and over all of them in µs, `steps.csv` next to it a row per step. Source:
Littlesnakess/GPUModeling25, `best_batch/module_times_average.csv` and the jobs' logs.
"""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.training.measured_file import STEP, MeasuredTime, read_measured

ALL_STAGES = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredComponent:
    """A component on one stage as measured; a stage of -1 stands for all.

    `time_ms` is what a simulation is compared with. `samples_ms` are single steps' values where
    they are known, `mean_ms` the mean over all steps that were recorded. What speaks against it is
    in `flags`: a flagged component is shown, and never scored.
    """

    name: str
    stage: int
    time_ms: float
    mean_ms: float
    samples_ms: tuple[float, ...] = ()
    flags: str = ""

    @property
    def variation_ratio(self) -> float:
        """Coefficient of variation over steps: standard deviation over mean; 0 of less than two."""
        if len(self.samples_ms) < 2:  # noqa: PLR2004  one value does not vary
            return 0.0
        return statistics.stdev(self.samples_ms) / statistics.fmean(self.samples_ms)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the samples, linear between ranks; 0 where there are none."""
        return float(np.percentile(self.samples_ms, percent)) if self.samples_ms else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTraining:
    """What was measured of one configuration. `num_flagged_steps` are not in `step`."""

    name: str
    source: str
    step: MeasuredComponent
    components: tuple[MeasuredComponent, ...] = ()
    num_flagged_steps: int = 0


_TRUTH_NAME, _STEPS_NAME = "truth.csv", "steps.csv"

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


def read_run(path: Path, name: str = "") -> MeasuredTraining:
    """Return the measured steps in a file or folder; `name` says of which configuration.

    The table `truth.csv` of GPUModeling25 is known by its columns, with a `steps.csv` next to it if
    there is one; a folder means that table in it. All else is read as `read_measured` does:
    a CSV, JSON or YAML table with `scenario`, `component`, `stage`, `time_ms` and `flags`, of which
    only `time_ms` is needed. Repeated rows are single steps: their median counts.

    Raises:
        InvalidRequestError: it cannot be read, has no unflagged step, or not this configuration.

    """
    table = path / _TRUTH_NAME if path.is_dir() else path
    if recognises(table):
        return read_truth(table, name)
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
    step = _merge(STEP, ALL_STAGES, steps)
    if step is None or step.flags:
        _refuse(path, f"has no time of a whole step of {name} without a flag (component `{STEP}`)")
    components = [
        _merge(component, stage, part)
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


def _merge(name: str, stage: int, rows: Sequence[MeasuredTime]) -> MeasuredComponent | None:
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
