"""Measured components of a training step compared with simulated ones."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.requests.scenario import TrainingScenario
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
    """Return every measured component with the simulated one, by component and stage."""
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


FORWARD = "layers, forward"
BACKWARD = "layers, backward"
OUTSIDE_LAYERS = "rest of the passes"
WAITING = "waiting and other"

# Of the first stage: nothing there waits for another stage's update.
_STAGE = 0

Times = Mapping[str, float]


def forward_share(scenario: TrainingScenario) -> float:
    """Return the share of a layer's tensor-parallel reductions that are in its forward pass.

    The backward pass has as many as the forward one, and as many again where it runs that again.
    """
    again = 0.0
    if scenario.recompute == "full":
        num_chunks = scenario.layout.pp * scenario.virtual_stages
        num_layers = scenario.model.num_layers / num_chunks
        again = min(scenario.recompute_layers / num_layers, 1.0) or 1.0
    return 1.0 / (2.0 + again)


def split_step(
    step_ms: float, times: Times, calls: Mapping[str, int], reduced_forward: float
) -> Mapping[str, float]:
    """Return the ms of a step by part, from components' times and how often each is in the step.

    A layer's passes contain `mp_allreduce`, `reduced_forward` of it the forward pass, a stage's
    passes the layers, and `optimizer` contains `dp_allgather`: each part is without what it
    contains. What is left of the step is waiting, and all that was not measured; nothing where the
    parts are longer than the step.
    """
    whole = {name: time_ms * calls.get(name, 0) for name, time_ms in times.items()}
    reduced = whole.get("mp_allreduce", 0.0)
    shares = {"encoder_fwd": reduced_forward, "encoder_bwd": 1.0 - reduced_forward}
    alone = {
        name: max(whole[name] - share * reduced, 0.0)
        for name, share in shares.items()
        if name in whole
    }
    parts = {
        FORWARD: alone.get("encoder_fwd", 0.0),
        BACKWARD: alone.get("encoder_bwd", 0.0),
        "mp_allreduce": reduced,
    }
    if "stage_fwd" in whole and "stage_bwd" in whole:
        outside = whole["stage_fwd"] + whole["stage_bwd"] - sum(parts.values())
        parts[OUTSIDE_LAYERS] = max(outside, 0.0)
    gathered = whole.get("dp_allgather", 0.0)
    parts["pp_p2p"] = whole.get("pp_p2p", 0.0)
    parts["dp_allreduce"] = whole.get("dp_allreduce", 0.0)
    if "optimizer" in whole:
        gathered = min(gathered, whole["optimizer"])
    parts["dp_allgather"] = gathered
    parts["optimizer"] = whole.get("optimizer", gathered) - gathered
    parts[WAITING] = max(step_ms - sum(parts.values()), 0.0)
    return {name: time_ms for name, time_ms in parts.items() if time_ms > 0}


def compare_proportions(
    run: MeasuredTraining, report: TrainingReport, scenario: TrainingScenario
) -> Mapping[str, Mapping[str, float]]:
    """Return the parts in ms of the first stage's step, `measured` and `simulated`.

    How often a component is in a step is the simulation's count for both. Flagged times count too:
    a picture with a flagged part says more than one without. Empty without measured components.
    """
    here = [item for item in report.components if item.stage == _STAGE]
    calls = {item.name: item.num_calls for item in here}
    measured: dict[str, float] = {}
    for item in sorted(run.components, key=lambda item: item.stage):
        # What was measured of the stage itself replaces what stands for all.
        if item.stage in (ALL_STAGES, _STAGE) and item.name in calls:
            measured[item.name] = item.time_ms
    if not measured:
        return {}
    simulated = {item.name: item.time_ms for item in here if item.name in measured}
    share = forward_share(scenario)
    return {
        "measured": split_step(run.step.time_ms, measured, calls, share),
        "simulated": split_step(report.step_time_ms, simulated, calls, share),
    }


REST = "not measured"

_PASSES = (("stage_fwd", "encoder_fwd"), ("stage_bwd", "encoder_bwd"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What the error of a component adds to that of the step.

    `error_ms` adds up to the step's error over all contributions; `share_ratio` is that over the
    sum of all without their signs.
    """

    name: str
    error_ms: float
    share_ratio: float


def attribute_error(
    step: ComponentComparison,
    rows: Sequence[ComponentComparison],
    report: TrainingReport,
    scenario: TrainingScenario,
) -> tuple[Contribution, ...]:
    """Return the contributions, the largest first; none without scored components.

    Taken as small errors of a pipeline filled once: the slowest stage runs every micro batch on the
    critical path, each other stage one, and each boundary is crossed once forward and once back.
    Of a reduction and a gathering counts what no computation hides. The rest is what no scored
    component explains.
    """
    scored = {(row.name, row.stage): row for row in rows if row.is_scored}
    parts = _passes(scored, report, scenario)
    pp = scenario.layout.pp
    sends = [row.error_ms for (name, _), row in scored.items() if name == "pp_p2p"]
    if sends and pp > 1:
        parts["pp_p2p"] = 2 * (pp - 1) * statistics.fmean(sends)
    exposed = _exposed_ratio(report)
    for name in ("dp_allreduce", "dp_allgather"):
        row = _at(scored, name, 0)
        if row is not None:
            parts[name] = row.error_ms * exposed
    update = _at(scored, "optimizer", 0)
    if update is not None:
        # It contains the gathering of parameters.
        parts["optimizer"] = update.error_ms - parts.get("dp_allgather", 0.0)
    if not parts:
        return ()
    parts[REST] = step.error_ms - sum(parts.values())
    whole = sum(map(abs, parts.values())) or 1.0
    ordered = sorted(parts.items(), key=lambda item: -abs(item[1]))
    return tuple(
        Contribution(name=name, error_ms=error_ms, share_ratio=abs(error_ms) / whole)
        for name, error_ms in ordered
    )


def _passes(
    scored: Mapping[tuple[str, int], ComponentComparison],
    report: TrainingReport,
    scenario: TrainingScenario,
) -> dict[str, float]:
    """Return what the passes add: of whole stages where those were measured, else of layers."""
    num_stages, num_micro_batches = scenario.layout.pp, report.num_micro_batches
    calls = {(item.name, item.stage): item.num_calls for item in report.components}
    parts = {}
    errors: dict[str, list[float]] = {}
    measured = [0.0] * num_stages
    for whole, layer in _PASSES:
        name = whole if any(found == whole for found, _ in scored) else layer
        found = [_at(scored, name, stage) for stage in range(num_stages)]
        if not any(found):
            continue
        errors[name] = []
        for stage, row in enumerate(found):
            # A layer occurs as often in a pass as the stage has layers.
            per_pass = calls.get((name, stage), num_micro_batches) / max(num_micro_batches, 1)
            errors[name].append(row.error_ms * per_pass if row else 0.0)
            measured[stage] += row.measured_ms * per_pass if row else 0.0
    slowest = max(range(num_stages), key=lambda stage: measured[stage])
    for name, values in errors.items():
        others = sum(values) - values[slowest]
        fill = others / max(scenario.virtual_stages, 1)
        parts[name] = num_micro_batches * values[slowest] + fill
    return parts


def _at(
    scored: Mapping[tuple[str, int], ComponentComparison], name: str, stage: int
) -> ComponentComparison | None:
    """Return what was measured of the stage, of all stages, or of the nearest one before it."""
    for number in (stage, ALL_STAGES):
        if (name, number) in scored:
            return scored[name, number]
    before = [number for found, number in scored if found == name and 0 <= number < stage]
    return scored[name, max(before)] if before else None


def _exposed_ratio(report: TrainingReport) -> float:
    whole = report.communication_ms_by_axis.get("dp", 0.0)
    return min(report.exposed_ms_by_axis.get("dp", 0.0) / whole, 1.0) if whole else 1.0
