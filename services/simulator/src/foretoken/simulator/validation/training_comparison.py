"""Measured components of a training step beside simulated ones, with their errors."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.results.training_report import ComponentTime, TrainingReport
from foretoken.simulator.validation.training_run import (
    ALL_STAGES,
    MeasuredComponent,
    MeasuredTraining,
)

# A step's parts in the order of a table: of a layer, of a stage, between devices, at the end.
COMPONENTS = (
    *("encoder_fwd", "encoder_bwd", "stage_fwd", "stage_bwd", "mp_allreduce", "pp_p2p"),
    *("dp_allreduce", "dp_allgather", "optimizer", "update"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentComparison:
    """One component on one stage (-1: all), measured and simulated, in ms of one occurrence.

    `simulated_ms` is 0 where the simulation has no such component, for which `flags` is not empty
    either. Flagged ones are shown and never scored.
    """

    name: str
    stage: int
    measured_ms: float
    simulated_ms: float
    flags: str = ""

    @property
    def is_scored(self) -> bool:
        """Whether the error counts."""
        return not self.flags

    @property
    def error_ms(self) -> float:
        """Simulated less measured."""
        return self.simulated_ms - self.measured_ms

    @property
    def error_ratio(self) -> float:
        """Simulated over measured, less one."""
        return self.simulated_ms / self.measured_ms - 1.0 if self.measured_ms else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentScore:
    """Errors of a component over the stages that are scored; `mape_ratio` drops their signs."""

    name: str
    num_scored: int
    num_flagged: int
    mean_error_ratio: float
    mape_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """How a measured time varies over steps; all but `mean_ratio` are 0 without single steps.

    `mean_ratio` is the mean of all recorded steps over the time that is compared, less one.
    """

    name: str
    stage: int
    num_samples: int
    time_ms: float
    mean_ratio: float
    variation_ratio: float
    p10_ms: float
    p90_ms: float

    @property
    def is_known(self) -> bool:
        """Whether there is more than the one time that is compared."""
        return self.num_samples > 0 or self.mean_ratio != 0


def compare_step(run: MeasuredTraining, report: TrainingReport) -> ComponentComparison:
    """Return the whole step, measured and simulated."""
    return ComponentComparison(
        name="step",
        stage=ALL_STAGES,
        measured_ms=run.step.time_ms,
        simulated_ms=report.step_time_ms,
    )


def compare_components(
    run: MeasuredTraining, report: TrainingReport
) -> tuple[ComponentComparison, ...]:
    """Return every measured component beside the simulated one, by component and stage."""
    simulated = simulated_times(report.components)
    rows = [_compare(item, simulated) for item in run.components]
    return tuple(sorted(rows, key=lambda row: (_place(row.name), row.name, row.stage)))


def simulated_times(components: Sequence[ComponentTime]) -> Mapping[tuple[str, int], float]:
    """Return the ms of components by name and stage; their mean over stages by stage -1."""
    times = {(item.name, item.stage): item.time_ms for item in components}
    for name in {item.name for item in components}:
        values = [item.time_ms for item in components if item.name == name]
        times[name, ALL_STAGES] = statistics.fmean(values)
    return times


def _compare(
    item: MeasuredComponent, simulated: Mapping[tuple[str, int], float]
) -> ComponentComparison:
    found = simulated.get((item.name, item.stage), 0.0)
    return ComponentComparison(
        name=item.name,
        stage=item.stage,
        measured_ms=item.time_ms,
        simulated_ms=found,
        flags=item.flags or ("" if found else "not simulated"),
    )


def score_components(rows: Sequence[ComponentComparison]) -> tuple[ComponentScore, ...]:
    """Return the errors of each component over its stages, and of all together as `all`."""
    names = list(dict.fromkeys(row.name for row in rows))
    parts = {name: [row for row in rows if row.name == name] for name in names}
    scores = [_score(name, part) for name, part in parts.items()]
    return (*scores, _score("all", rows)) if scores else ()


def score_runs(
    runs: Sequence[Sequence[ComponentComparison]],
) -> Mapping[str, tuple[ComponentScore, ...]]:
    """Return the errors of each component in each run, and over all runs last.

    Components are those of any run, in their order, and `all`; those a run has not score nothing.
    """
    every = [row for run in runs for row in run]
    names = sorted({row.name for row in every}, key=lambda name: (_place(name), name))
    picked = [(name, [[row for row in run if row.name == name] for run in runs]) for name in names]
    return {
        name: tuple(_score(name, part) for part in (*parts, [row for run in parts for row in run]))
        for name, parts in [*picked, ("all", [list(run) for run in runs])]
    }


def _score(name: str, rows: Sequence[ComponentComparison]) -> ComponentScore:
    errors = [row.error_ratio for row in rows if row.is_scored]
    return ComponentScore(
        name=name,
        num_scored=len(errors),
        num_flagged=len(rows) - len(errors),
        mean_error_ratio=statistics.fmean(errors) if errors else 0.0,
        mape_ratio=statistics.fmean(map(abs, errors)) if errors else 0.0,
    )


def measure_stability(run: MeasuredTraining) -> tuple[Stability, ...]:
    """Return how the step and its components vary, as far as the run tells."""
    ordered = sorted(run.components, key=lambda item: (_place(item.name), item.name, item.stage))
    return tuple(
        Stability(
            name=item.name,
            stage=item.stage,
            num_samples=len(item.samples_ms),
            time_ms=item.time_ms,
            mean_ratio=item.mean_ms / item.time_ms - 1.0 if item.time_ms else 0.0,
            variation_ratio=item.variation_ratio,
            p10_ms=item.percentile_ms(10),
            p90_ms=item.percentile_ms(90),
        )
        for item in (run.step, *ordered)
        if not item.flags
    )


def _place(name: str) -> int:
    return COMPONENTS.index(name) if name in COMPONENTS else len(COMPONENTS)
