"""The sections of a page about predicted and measured steps."""

from collections.abc import Sequence

import numpy as np

from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.units import US_PER_MS
from foretoken.page.section import Cell, DataTable, Fact, Picture, Section
from foretoken.simulator.validation.chart import draw_pairs
from foretoken.simulator.validation.steps import StepComparison, StepsValidation, describe_shares

# An error above this is pointed out.
_ALERT_RATIO = 0.1
_NUM_PARTS = 8


def steps_sections(validations: Sequence[StepsValidation]) -> list[Section]:
    """Return a picture of all steps, and for each report its errors and what its steps consist of.

    Reports without a step that was measured have no part in the picture.
    """
    sections = [_overview(validations)]
    for validation in validations:
        sections += [_errors(validation), _composition(validation)]
    return sections


def _overview(validations: Sequence[StepsValidation]) -> Section:
    steps = [step for validation in validations for step in validation.steps]
    pictures: tuple[Picture, ...] = ()
    if steps:
        measured = np.array([step.measured.latency_us_median / US_PER_MS for step in steps])
        predicted = np.array([step.predicted_us / US_PER_MS for step in steps])
        svg = draw_pairs("steps", "step (ms)", measured, predicted)
        pictures = (Picture(svg=svg, caption="Each step, measured and predicted"),)
    return Section(
        title="Steps",
        intro=(
            "A step is predicted as the sum of its operators and what the host takes; nothing is"
            " fitted to measured steps. Errors are predicted over measured, less one."
        ),
        facts=[
            Fact(
                label=f"{item.model} on {item.device}, median error",
                value=f"{item.error_median:.1%}",
                note=f"P90 {item.error_p90:.1%}",
            )
            for item in validations
            if item.steps
        ],
        pictures=pictures,
    )


def _errors(validation: StepsValidation) -> Section:
    rows: list[Sequence[str | Cell]] = [_row(step) for step in validation.steps]
    rows += [
        (_name(item.step), "not measured", "", "", "", "", item.reason)
        for item in validation.failed
    ]
    return Section(
        title=f"{validation.model} on {validation.device}",
        intro=" ".join((f"{validation.framework}.", *(f"{text}." for text in validation.notes))),
        table=DataTable(
            headers=(
                "step",
                "measured (ms)",
                "predicted (ms)",
                "low to high",
                "error",
                "kernels counted, seen",
                "rests on",
            ),
            rows=rows,
            text_columns=(6,),
        ),
    )


def _row(step: StepComparison) -> Sequence[str | Cell]:
    low, high = step.low_us / US_PER_MS, step.high_us / US_PER_MS
    return (
        _name(step.measured.step),
        format_number(step.measured.latency_us_median / US_PER_MS),
        format_number(step.predicted_us / US_PER_MS),
        f"{format_number(low)} to {format_number(high)}",
        _error_cell(step.error_ratio),
        f"{step.num_kernels or '-'}, {step.measured.num_kernels or '-'}",
        describe_shares(step),
    )


def _composition(validation: StepsValidation) -> Section:
    rows = [
        (
            _name(step.measured.step),
            part.name,
            str(part.num_calls),
            format_number(part.latency_us / US_PER_MS),
            f"{part.latency_us / max(step.predicted_us, 1e-9):.1%}",
            part.provenance.name.lower(),
        )
        for step in validation.steps
        for part in step.parts[:_NUM_PARTS]
    ]
    return Section(
        title=f"{validation.model} on {validation.device}: what steps consist of",
        table=DataTable(
            headers=("step", "operator", "calls", "takes (ms)", "of the step", "weakest ground"),
            rows=rows,
            text_columns=(1, 5),
        ),
    )


def _error_cell(error_ratio: float) -> str | Cell:
    text = f"{error_ratio:+.1%}"
    return Cell(text=text, tone="alert") if abs(error_ratio) > _ALERT_RATIO else text


def _name(step: ClosureStep) -> str:
    return f"{step.kind} {step.batch_size} x {step.num_tokens} {step.mode}"
