"""The sections of a page about predicted and measured steps."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.measurements.profiling import ClosureStep
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.units import US_PER_MS
from foretoken.page.block import Cell, Chart, Table, Value
from foretoken.page.chart import Plot
from foretoken.page.section import Section
from foretoken.simulator.validation.finding import error_cell, pairs_chart
from foretoken.simulator.validation.steps import StepComparison, StepsValidation, describe_shares

# An error above this is pointed out.
_ALERT_RATIO = 0.1
_NUM_PARTS = 8


def steps_sections(
    validations: Sequence[StepsValidation], *, has_pictures: bool = True
) -> list[Section]:
    """Return a picture of all steps, and for each report its errors and what its steps consist of.

    Reports without a step that was measured have no part in the picture.
    """
    overview = _overview(validations)
    if has_pictures:
        overview = replace(overview, pictures=_draw(validations))
    sections = [overview]
    for validation in validations:
        sections += [_errors(validation), _composition(validation)]
    return sections


def _draw(validations: Sequence[StepsValidation]) -> Sequence[Chart]:
    steps = [step for validation in validations for step in validation.steps]
    if not steps:
        return ()
    measured = np.array([step.measured.latency_us_median / US_PER_MS for step in steps])
    predicted = np.array([step.predicted_us / US_PER_MS for step in steps])
    plot = Plot(title="Steps", caption="Each step, measured and predicted")
    return (pairs_chart(plot, "step (ms)", measured, predicted),)


def _overview(validations: Sequence[StepsValidation]) -> Section:
    facts = [
        Value(
            label=f"{item.model} on {item.device}, errors of {len(item.steps)} steps",
            value=f"median {item.error_median:.1%}",
            note=f"P90 {item.error_p90:.1%}",
        )
        for item in validations
        if item.steps
    ]
    errors = [abs(step.error_ratio) for item in validations for step in item.steps]
    if len(facts) > 1:
        median, largest = statistics.median(errors), max(errors)
        label, note = f"errors of all {len(errors)} steps", f"largest {largest:.1%}"
        facts.append(Value(label=label, value=f"median {median:.1%}", note=note))
    return Section(
        title="Steps",
        intro=(
            "A step is predicted as the sum of its operators and what the host takes; nothing is"
            " fitted to measured steps. Errors are predicted over measured, less one."
        ),
        facts=facts,
    )


def _errors(validation: StepsValidation) -> Section:
    rows = [_row(step) for step in validation.steps]
    rows += [
        (_name(item.step), "not measured", "", "", "", "", "", item.reason)
        for item in validation.failed
    ]
    headers = (
        *("step", "measured (ms)", "predicted (ms)", "low to high", "error"),
        *("host (ms)", "kernels counted, seen", "rests on"),
    )
    return Section(
        title=f"{validation.model} on {validation.device}",
        intro=" ".join((f"{validation.framework}.", *(f"{text}." for text in validation.notes))),
        table=Table.listed(headers, rows, text_columns=(7,)),
    )


def _row(step: StepComparison) -> Sequence[float | str | Cell]:
    low, high = (format_number(bound / US_PER_MS) for bound in (step.low_us, step.high_us))
    return (
        _name(step.measured.step),
        step.measured.latency_us_median / US_PER_MS,
        step.predicted_us / US_PER_MS,
        f"{low} to {high}",
        error_cell(step.error_ratio, _ALERT_RATIO),
        step.host_us / US_PER_MS if step.host_us else "-",
        f"{step.num_kernels or '-'}, {step.measured.num_kernels or '-'}",
        describe_shares(step),
    )


def _composition(validation: StepsValidation) -> Section:
    rows = [
        (
            *(_name(step.measured.step), part.name, part.num_calls, part.latency_us / US_PER_MS),
            f"{part.latency_us / max(step.predicted_us, 1e-9):.1%}",
            part.provenance.name.lower(),
        )
        for step in validation.steps
        for part in step.parts[:_NUM_PARTS]
    ]
    headers = ("step", "operator", "calls", "takes (ms)", "of the step", "weakest ground")
    return Section(
        title=f"{validation.model} on {validation.device}: what steps consist of",
        table=Table.listed(headers, rows, text_columns=(1, 5)),
    )


def _name(step: ClosureStep) -> str:
    return f"{step.kind} {step.batch_size} x {step.num_tokens} {step.mode}"
