"""The sections of a page about a validation."""

from collections.abc import Sequence

import numpy as np

from foretoken.domain.metrics.metric import title_of
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.page.figure import BLUE, ORANGE
from foretoken.page.section import Cell, DataTable, Fact, Picture, Section
from foretoken.simulator.report.plots import draw_stacked_rows
from foretoken.simulator.validation.chart import draw_pairs, draw_shares
from foretoken.simulator.validation.comparison import STATISTICS, MetricComparison
from foretoken.simulator.validation.decode_step import DecodeComparison
from foretoken.simulator.validation.serving import ServingValidation

# An error above this is pointed out.
_ALERT_RATIO = 0.05
_COMPONENT_COLORS = {
    "front end": "#8f959c",
    "queueing": "#d55e00",
    "prefill": "#e69f00",
    "decode": "#0072b2",
    "unexplained": "#cc79a7",
}
_FEATURES = {"batch": "requests in the batch", "prefill_tokens": "prompt tokens beside them"}


def validation_sections(validation: ServingValidation) -> list[Section]:
    """Return findings, figures, pictures and the worst requests of a validation."""
    sections = [_findings(validation), _figures(validation), _distributions(validation)]
    sections += [_residual(validation)]
    if validation.decode is not None and validation.decode.ranges:
        sections += [_steps(validation), _step_parts(validation.decode)]
    return [*sections, _worst(validation)]


def _findings(validation: ServingValidation) -> Section:
    left_out = validation.num_failed + validation.num_unfinished
    facts = [
        Fact(
            label=f"{METRICS[item.name].label} mean",
            value=f"{item.error_ratio('mean'):+.1%}",
            note=f"per request {item.mape_ratio:.1%} off" if item.mape_ratio else "",
        )
        for item in validation.metrics
    ]
    rows = [(item.component, item.text, item.advice) for item in validation.findings]
    return Section(
        title="What the comparison says",
        intro=(
            f"{validation.num_compared} requests of {validation.run_name}"
            f" ({validation.source}) beside their simulation. Errors are simulated over measured,"
            f" less one. {left_out} requests are left out, as they were not completed in both."
        ),
        facts=facts,
        table=DataTable(
            headers=("component", "finding", "what to do"), rows=rows, text_columns=(1, 2)
        ),
    )


def _figures(validation: ServingValidation) -> Section:
    headers = ("", "measured", "simulated", "error")
    rows = [row for metric in validation.metrics for row in _metric_rows(metric)]
    rows += [
        (
            METRICS[rate.name].title,
            format_number(rate.measured),
            format_number(rate.simulated),
            _error_cell(rate.error_ratio),
        )
        for rate in validation.rates
    ]
    return Section(title="Figures", table=DataTable(headers=headers, rows=rows))


def _metric_rows(metric: MetricComparison) -> Sequence[Sequence[str | Cell]]:
    label, unit = METRICS[metric.name].label, METRICS[metric.name].unit
    return [
        (
            title_of(f"{label} {statistic}", unit),
            format_number(getattr(metric.measured, statistic)),
            format_number(getattr(metric.simulated, statistic)),
            _error_cell(metric.error_ratio(statistic)),
        )
        for statistic in STATISTICS
    ]


def _error_cell(error_ratio: float) -> str | Cell:
    text = f"{error_ratio:+.1%}"
    return Cell(text=text, tone="alert") if abs(error_ratio) > _ALERT_RATIO else text


def _distributions(validation: ServingValidation) -> Section:
    requests = validation.requests
    ttft = {
        "measured": [item.measured_ttft_ms for item in requests],
        "simulated": [item.simulated_ttft_ms for item in requests],
    }
    e2e = (
        np.array([item.measured_e2e_latency_ms for item in requests]),
        np.array([item.simulated_e2e_latency_ms for item in requests]),
    )
    return Section(
        title="Request by request",
        pictures=(
            Picture(
                svg=draw_shares(
                    "validation-ttft", "Time to first token (ms)", ttft, (ORANGE, BLUE)
                ),
                caption="The share of requests whose first token came within a time.",
            ),
            Picture(
                svg=draw_pairs("validation-e2e", "End-to-end latency (ms)", *e2e),
                caption="Each dot is a request; on the line both agree.",
            ),
        ),
    )


def _residual(validation: ServingValidation) -> Section:
    rows = {
        "measured": {item.name: max(item.measured_ms, 0.0) for item in validation.components},
        "simulated": {item.name: max(item.simulated_ms, 0.0) for item in validation.components},
    }
    is_estimated = any(item.is_estimated for item in validation.components)
    note = " The measured parts before the first token are estimated by regression, because the"
    note += " run does not tell when requests were scheduled."
    svg = draw_stacked_rows("residual", "A mean request", "time (ms)", rows, _COMPONENT_COLORS)
    return Section(
        title="Where the error sits",
        pictures=(
            Picture(
                svg=svg,
                caption="The time of a mean request by what it did." + note * is_estimated,
            ),
        ),
        table=DataTable(
            headers=("part", "measured (ms)", "simulated (ms)", "share of the error"),
            rows=[
                (
                    item.name,
                    format_number(item.measured_ms),
                    format_number(item.simulated_ms),
                    f"{item.share_ratio:.0%}",
                )
                for item in validation.components
            ],
        ),
    )


def _steps(validation: ServingValidation) -> Section:
    decode = validation.decode
    ranges = decode.ranges if decode is not None else ()
    return Section(
        title="Decode steps",
        intro=(
            "The gap between two tokens of a request, by what else ran in those steps. Simulated is"
            " what the simulation's steps take with what was in the measured ones, so that a"
            " difference here is one of step times alone."
        ),
        table=DataTable(
            headers=("with", "from", "to", "tokens", "measured (ms)", "simulated (ms)", "error"),
            rows=[
                (
                    _FEATURES[item.feature],
                    format_number(item.low),
                    format_number(item.high),
                    f"{item.share_ratio:.0%}",
                    format_number(item.measured_ms),
                    format_number(item.simulated_ms),
                    _error_cell(item.error_ratio),
                )
                for item in ranges
            ],
        ),
    )


def _step_parts(decode: DecodeComparison) -> Section:
    return Section(
        title="A mean decode step",
        intro=(
            f"Of {decode.mean_batch:.1f} requests with {decode.mean_context_tokens:,.0f} tokens of"
            f" context and {decode.mean_prefill_tokens:.1f} tokens of prompt. Both columns are"
            " fitted alike, to stretches of the measured run and to the simulated requests; parts"
            " that rise together, such as requests and context, are hard to tell apart."
        ),
        table=DataTable(
            headers=("part", "measured (ms)", "simulated (ms)"),
            rows=[
                (name, format_number(measured), format_number(simulated))
                for name, measured, simulated in decode.parts
            ],
        ),
    )


def _worst(validation: ServingValidation) -> Section:
    headers = (
        "request",
        "arrival (s)",
        "prompt",
        "answer",
        "TTFT measured (ms)",
        "simulated",
        "e2e measured (ms)",
        "simulated",
    )
    rows = [
        (
            str(item.index),
            format_number(item.arrival_s),
            str(item.num_prefill_tokens),
            str(item.num_decode_tokens),
            format_number(item.measured_ttft_ms),
            format_number(item.simulated_ttft_ms),
            format_number(item.measured_e2e_latency_ms),
            format_number(item.simulated_e2e_latency_ms),
        )
        for item in validation.worst
    ]
    return Section(title="Requests furthest off", table=DataTable(headers=headers, rows=rows))
