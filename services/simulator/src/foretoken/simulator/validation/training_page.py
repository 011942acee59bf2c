"""The sections of a page about a validation of training steps."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.metrics.number_text import format_number
from foretoken.page.block import Cell, Chart, Column, Table, Value
from foretoken.page.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Plot
from foretoken.page.curve import draw_parts
from foretoken.page.section import Section
from foretoken.simulator.validation.finding import error_cell, findings_section
from foretoken.simulator.validation.training import TrainingValidation
from foretoken.simulator.validation.training_comparison import (
    BACKWARD,
    FORWARD,
    OUTSIDE_LAYERS,
    WAITING,
    ComponentComparison,
    score_runs,
)
from foretoken.simulator.validation.training_run import ALL_STAGES

# An error above this is pointed out.
_ALERT_RATIO = 0.08
# In the order in which a step runs them.
_PARTS = (
    *(FORWARD, BACKWARD, "mp_allreduce", OUTSIDE_LAYERS, "pp_p2p"),
    *("dp_allreduce", "dp_allgather", "optimizer", WAITING),
)


def training_validation_sections(
    validations: Sequence[TrainingValidation], *, has_pictures: bool = True
) -> list[Section]:
    """Return findings, components, error's origin, stability and proportions of each run.

    Of more than one run the errors of all come first, and the others' titles name their run.
    """
    if len(validations) == 1:
        return _sections(validations[0], "" if has_pictures else None)
    sections = [_runs(validations)]
    for index, validation in enumerate(validations):
        sections += [
            replace(section, title=f"{validation.run_name}: {section.title.lower()}")
            for section in _sections(validation, f"run{index}-" if has_pictures else None)
        ]
    return sections


def _sections(validation: TrainingValidation, slug: str | None) -> list[Section]:
    """Return the sections of one run; `slug` begins the names of its pictures, if it has any."""
    sections = [_findings(validation)]
    if validation.components:
        sections += [_components(validation), _scores(validation)]
    if validation.contributions:
        sections.append(_contributions(validation))
    spread = validation.simulated_spread_ms
    if spread.p99 > spread.p50 or any(item.is_known for item in validation.stability):
        sections.append(_stability(validation))
    if validation.proportions:
        proportions = _proportions(validation)
        if slug is not None:
            proportions = replace(proportions, pictures=(_draw_proportions(validation),))
        sections.append(proportions)
    return sections


def _runs(validations: Sequence[TrainingValidation]) -> Section:
    scores = score_runs([validation.components for validation in validations])
    rows: list[Sequence[str]] = [
        (name, *(f"{item.mape_ratio:.1%}" if item.num_scored else "-" for item in row))
        for name, row in scores.items()
    ]
    errors = [validation.step.error_ratio for validation in validations]
    mean = statistics.fmean(map(abs, errors))
    headers = ("component", *(item.run_name for item in validations), "all runs")
    rows.append(("step, with its sign", *(f"{error:+.1%}" for error in errors), f"{mean:.1%}"))
    return Section(
        title="Errors of all runs",
        intro="Means without signs over the stages that are scored; flagged rows are left out.",
        table=Table.listed(headers=headers, rows=rows),
    )


def _findings(validation: TrainingValidation) -> Section:
    step, raw = validation.step, validation.step_raw
    facts = [
        Value(
            label="step, measured",
            value=step.measured_ms,
            unit="ms",
            note=f"{validation.num_flagged_steps} of its steps flagged and left out",
        ),
        Value(
            label="step, simulated",
            value=step.simulated_ms,
            unit="ms",
            note=f"{format_number(validation.simulated_low_ms)} to"
            f" {format_number(validation.simulated_high_ms)} ms by the errors of operators",
        ),
        Value(label="error of the step", value=f"{step.error_ratio:+.1%}"),
    ]
    if raw.simulated_ms != step.simulated_ms:
        note = f"{format_number(raw.simulated_ms)} ms"
        error = f"{raw.error_ratio:+.1%}"
        facts.append(Value(label="without calibration", value=error, note=note))
    if validation.scores and validation.scores[-1].num_scored:
        overall = validation.scores[-1]
        facts.append(
            Value(
                label="error of components",
                value=f"{overall.mape_ratio:.1%}",
                note=f"mean without signs of {overall.num_scored},"
                f" {overall.num_flagged} flagged left out",
            )
        )
    intro = (
        f"{validation.run_name} ({validation.source}) compared with its simulation. Errors are"
        " simulated over measured, less one."
    )
    return findings_section(intro, facts, validation.findings)


def _components(validation: TrainingValidation) -> Section:
    headers = ("component", "stage", "measured (ms)", "simulated (ms)", "error", "flags")
    rows = [_component_row(row) for row in (validation.step, *validation.components)]
    return Section(
        title="Components",
        intro="Means of one occurrence. Flagged rows are shown and not scored.",
        table=Table.listed(headers, rows, text_columns=(5,)),
    )


def _component_row(row: ComponentComparison) -> Sequence[float | str | Cell]:
    is_simulated = row.simulated_ms > 0
    error = error_cell(row.error_ratio, _ALERT_RATIO if row.is_scored else math.inf)
    if not is_simulated:
        error = "-"
    return (
        *(row.name, _stage(row.stage), row.measured_ms),
        row.simulated_ms if is_simulated else "-",
        error if row.is_scored else f"({error})",
        row.flags,
    )


def _stage(stage: int) -> str:
    return "all" if stage == ALL_STAGES else str(stage)


def _scores(validation: TrainingValidation) -> Section:
    rows: list[Sequence[float | str]] = [
        (
            *(item.name, item.num_scored, item.num_flagged),
            f"{item.mean_error_ratio:+.1%}" if item.num_scored else "-",
            f"{item.mape_ratio:.1%}" if item.num_scored else "-",
        )
        for item in validation.scores
    ]
    error = validation.step.error_ratio
    rows.append(("step", 1, 0, f"{error:+.1%}", f"{abs(error):.1%}"))
    headers = ("component", "scored", "flagged", "mean error", "without signs")
    return Section(title="Errors by component", table=Table.listed(headers, rows))


def _contributions(validation: TrainingValidation) -> Section:
    rows = [
        (item.name, _signed(item.error_ms), f"{item.share_ratio:.0%}")
        for item in validation.contributions
    ]
    return Section(
        title="What the error of the step comes from",
        intro=(
            "How much longer (+) or shorter the simulated step is by each component: the slowest"
            " stage's passes count once for every micro batch, other stages' once, a transfer twice"
            " for every boundary, what follows the pipeline once."
        ),
        table=Table.listed(("component", "of the step (ms)", "share"), rows),
    )


def _stability(validation: TrainingValidation) -> Section:
    spread = validation.simulated_spread_ms
    simulated = "The simulated spread is none: the scenario has no stragglers or skipped updates."
    if spread.p99 > spread.p50:
        simulated = (
            f"Of simulated steps half take at most {format_number(spread.p50)} ms, nine of ten"
            f" {format_number(spread.p90)} ms, 99 of 100 {format_number(spread.p99)} ms."
        )
    rows = [
        (
            *(item.name, _stage(item.stage), item.num_samples or "-"),
            *(item.time_ms, f"{item.mean_ratio:+.1%}"),
            *(
                (f"{item.variation_ratio:.1%}", item.p10_ms, item.p90_ms)
                if item.num_samples
                else ("-", "-", "-")
            ),
        )
        for item in validation.stability
        if item.is_known
    ]
    headers = (
        *("component", "stage", "steps", "compared (ms)", "mean over it", "variation"),
        *("P10 (ms)", "P90 (ms)"),
    )
    return Section(
        title="Stability",
        intro=(
            "How measured times vary over steps: the mean of all recorded steps against the time"
            " that is compared, and the standard deviation over the mean where single steps are"
            f" known. {simulated}"
        ),
        table=Table.listed(headers, rows) if rows else None,
    )


def _percent(validation: TrainingValidation) -> Mapping[str, Mapping[str, float]]:
    return {
        run: {name: 100 * time_ms / (sum(times.values()) or 1.0) for name, time_ms in times.items()}
        for run, times in validation.proportions.items()
    }


def _draw_proportions(validation: TrainingValidation) -> Chart:
    tints = (BLUE, ORANGE, "#8c6d1f", SKY, PURPLE, VERMILION, "#e9a3c4", GREEN, GREY)
    colors = dict(zip(_PARTS, tints, strict=True))
    title = "Shares of the first stage's step"
    rows = {
        run: {name: share / 100 for name, share in parts.items()}
        for run, parts in _percent(validation).items()
    }
    unit = Column(title="share of the step", name="share", unit=SHARE)
    return draw_parts(Plot(title=title, colors=colors), rows, unit)


def _proportions(validation: TrainingValidation) -> Section:
    parts, percent = validation.proportions, _percent(validation)
    rows = [
        (
            name,
            *(
                cell
                for run in parts
                for cell in (parts[run].get(name, 0.0), f"{percent[run].get(name, 0.0):.1f}%")
            ),
        )
        for name in _PARTS
        if any(name in times for times in parts.values())
    ]
    headers = ["part", *(head for run in parts for head in (f"{run} (ms)", "share"))]
    return Section(
        title="Proportions",
        intro="Shares of the first stage's step. Each part is without what it contains: layers"
        " without their reductions of tensor parallelism, the optimizer without the gathering of"
        " parameters. What is left of the step is waiting, and what was not measured.",
        table=Table.listed(headers, rows),
    )


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{format_number(abs(value))}"
