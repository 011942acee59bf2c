"""The sections of a page about a measured serving run and its simulation."""

from dataclasses import replace

import numpy as np

from foretoken.domain.metrics.metric import title_of
from foretoken.domain.metrics.registry import METRICS
from foretoken.page.block import Chart, Column
from foretoken.page.chart import BLUE, ORANGE, Plot
from foretoken.page.curve import draw_parts
from foretoken.page.section import Fact, Section
from foretoken.simulator.validation.decode_steps import DecodeComparison
from foretoken.simulator.validation.finding import error_cell, findings_section, number_table
from foretoken.simulator.validation.pictures import pairs_chart, shares_chart
from foretoken.simulator.validation.serving import STEP_FEATURES, ServingValidation
from foretoken.simulator.validation.serving_comparison import STATISTICS

# An error above this is pointed out.
_ALERT_RATIO = 0.05
_COMPONENT_COLORS = {
    "front end": "#8f959c",
    "queueing": "#d55e00",
    "prefill": "#e69f00",
    "decode": "#0072b2",
    "unexplained": "#cc79a7",
}


def validation_sections(
    validation: ServingValidation, *, has_pictures: bool = True
) -> list[Section]:
    """Return findings, figures, the error's parts and the worst requests of a validation."""
    sections = [_findings(validation), _figures(validation)]
    residual = _residual(validation)
    if has_pictures:
        sections.append(_distributions(validation))
        residual = replace(residual, pictures=(_draw_residual(validation),))
    sections.append(residual)
    if validation.decode is not None:
        sections += [_steps(validation.decode)] if validation.decode.ranges else []
        sections.append(_step_parts(validation.decode))
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
    intro = (
        f"{validation.num_compared} requests of {validation.run_name} ({validation.source})"
        " compared with their simulation. Errors are simulated over measured, less one."
        f" {left_out} requests are left out, as they were not completed in both."
    )
    return findings_section(intro, facts, validation.findings)


def _figures(validation: ServingValidation) -> Section:
    figures = [
        (
            title_of(f"{METRICS[item.name].label} {statistic}", METRICS[item.name].unit),
            getattr(item.measured, statistic),
            getattr(item.simulated, statistic),
            item.error_ratio(statistic),
        )
        for item in validation.metrics
        for statistic in STATISTICS
    ]
    figures += [
        (METRICS[rate.name].title, rate.measured, rate.simulated, rate.error_ratio)
        for rate in validation.rates
    ]
    rows = [(*figure[:3], error_cell(figure[3], _ALERT_RATIO)) for figure in figures]
    headers = ("", "measured", "simulated", "error")
    return Section(title="Figures", table=number_table(headers, rows))


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
    first = Plot(
        title="Time to first token",
        caption="The share of requests whose first token came within a time.",
        colors={"measured": ORANGE, "simulated": BLUE},
    )
    whole = Plot(
        title="End-to-end latency", caption="Each dot is a request; on the line both agree."
    )
    charts = (
        shares_chart(first, ttft, Column(title="Time to first token (ms)", name="ttft_ms")),
        pairs_chart(whole, "End-to-end latency (ms)", *e2e),
    )
    return Section(title="Request by request", pictures=charts)


def _draw_residual(validation: ServingValidation) -> Chart:
    parts = validation.components
    rows = {
        "measured": {item.name: max(item.measured_ms, 0.0) for item in parts},
        "simulated": {item.name: max(item.simulated_ms, 0.0) for item in parts},
    }
    caption = "The time of a mean request by what it did."
    plot = Plot(title="A mean request", caption=caption, colors=_COMPONENT_COLORS)
    return draw_parts(plot, rows, Column(title="time (ms)"))


def _residual(validation: ServingValidation) -> Section:
    parts = validation.components
    note = "The measured parts before the first token are estimated by regression, because the run"
    note += " does not tell when requests were scheduled."
    return Section(
        title="Where the error sits",
        intro=note if any(item.is_estimated for item in parts) else "",
        table=number_table(
            ("part of a mean request", "measured (ms)", "simulated (ms)", "share of the error"),
            [
                (item.name, item.measured_ms, item.simulated_ms, f"{item.share_ratio:.0%}")
                for item in parts
            ],
        ),
    )


def _steps(decode: DecodeComparison) -> Section:
    rows = [
        (
            *(STEP_FEATURES[item.feature], item.low, item.high, f"{item.share_ratio:.0%}"),
            *(item.measured_ms, item.simulated_ms, error_cell(item.error_ratio, _ALERT_RATIO)),
        )
        for item in decode.ranges
    ]
    return Section(
        title="Decode steps",
        intro=(
            "The gap between two tokens of a request, by what else ran in those steps. Simulated is"
            " what the simulation's steps take with what was in the measured ones, so that a"
            " difference here is one of step times alone."
        ),
        table=number_table(
            ("with", "from", "to", "tokens", "measured (ms)", "simulated (ms)", "error"), rows
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
        table=number_table(("part", "measured (ms)", "simulated (ms)"), decode.parts),
    )


def _worst(validation: ServingValidation) -> Section:
    headers = (
        *("request", "arrival (s)", "prompt", "answer"),
        *("TTFT measured (ms)", "simulated", "e2e measured (ms)", "simulated"),
    )
    names = (
        *("index", "arrival_s", "num_prefill_tokens", "num_decode_tokens"),
        *("measured_ttft_ms", "simulated_ttft_ms"),
        *("measured_e2e_latency_ms", "simulated_e2e_latency_ms"),
    )
    rows = [[getattr(item, name) for name in names] for item in validation.worst]
    return Section(title="Requests furthest off", table=number_table(headers, rows))
