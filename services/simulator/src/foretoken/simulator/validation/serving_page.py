"""The sections of a page about a measured serving run and its simulation."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.measurements.correction import Correction
from foretoken.domain.metrics.metric import title_of
from foretoken.domain.metrics.registry import METRICS
from foretoken.page.block import Cell, Chart, Column, Table, Value
from foretoken.page.chart import BLUE, ORANGE, Plot
from foretoken.page.curve import Curve, draw_curves, draw_parts
from foretoken.page.section import Section
from foretoken.simulator.validation.decode_steps import DecodeComparison
from foretoken.simulator.validation.finding import (
    error_cell,
    findings_section,
    pairs_chart,
    shares_chart,
)
from foretoken.simulator.validation.serving import STEP_FEATURES, ServingValidation
from foretoken.simulator.validation.serving_calibration import ServingCalibration
from foretoken.simulator.validation.serving_comparison import STATISTICS

# An error above this is pointed out.
_ALERT_RATIO = 0.05
_THROUGHPUT = "output_throughput_tps"
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


def sweep_sections(
    validations: Sequence[ServingValidation], *, has_pictures: bool = True
) -> list[Section]:
    """Return what a page says of several runs of one server: their errors first, then each.

    One alone is as `validation_sections` has it; the titles of several name their run.
    """
    if len(validations) == 1:
        return validation_sections(validations[0], has_pictures=has_pictures)
    parts = [
        replace(section, title=f"{validation.run_name}: {section.title}")
        for validation in validations
        for section in (_findings(validation), _figures(validation), _residual(validation))
    ]
    loads = _all_loads(validations)
    return [loads if has_pictures else replace(loads, pictures=()), *parts]


def _all_loads(validations: Sequence[ServingValidation]) -> Section:
    """Return the runs one below the other, and latency over throughput as both have it."""
    metrics = list(dict.fromkeys(item.name for one in validations for item in one.metrics))
    headers = ["run", "requests"]
    for name in (*metrics, _THROUGHPUT):
        label = METRICS[name].title if name == _THROUGHPUT else f"{METRICS[name].label} mean (ms)"
        headers += [f"{label}, measured", "simulated", "error"]
    rows = []
    for one in validations:
        means = {item.name: (item.measured.mean, item.simulated.mean) for item in one.metrics}
        means[_THROUGHPUT] = _throughput(one)
        row: list[float | str | Cell] = [one.run_name, one.num_compared]
        for name in (*metrics, _THROUGHPUT):
            measured, simulated = means.get(name, (0.0, 0.0))
            error = simulated / measured - 1.0 if measured else 0.0
            row += [measured, simulated, error_cell(error, _ALERT_RATIO)]
        rows.append(row)
    return Section(
        title="All loads",
        intro="Each run is simulated by itself, with its own requests at its own times.",
        pictures=tuple(_draw_loads(validations, name) for name in metrics),
        table=Table.listed(headers, rows),
    )


def _throughput(validation: ServingValidation) -> tuple[float, float]:
    found = next(rate for rate in validation.rates if rate.name == _THROUGHPUT)
    return found.measured, found.simulated


def _draw_loads(validations: Sequence[ServingValidation], name: str) -> Chart:
    metric = METRICS[name]
    points = sorted(
        (*_throughput(one), item.measured.mean, item.simulated.mean)
        for one in validations
        for item in one.metrics
        if item.name == name
    )
    curves = [
        Curve(
            label=label, x=[one[at] for one in points], y=[one[at + 2] for one in points], color=c
        )
        for at, (label, c) in enumerate((("measured", ORANGE), ("simulated", BLUE)))
    ]
    plot = Plot(title=f"{metric.label} by load", caption="Further right and lower is better.")
    x = Column(title=METRICS[_THROUGHPUT].title, name=_THROUGHPUT)
    return draw_curves(plot, curves, x=x, y=Column(title=f"{metric.label} mean (ms)", name=name))


def calibration_section(calibration: ServingCalibration) -> Section:
    """Return what was learned of a run, how far it was off and is, and how to use it."""
    correction = calibration.correction
    figures = [
        (f"{METRICS[raw.name].label} mean (ms)", raw.measured.mean, raw, now)
        for raw, now in zip(calibration.raw.metrics, calibration.calibrated.metrics, strict=True)
    ]
    rows = [
        (
            *(label, measured, raw.simulated.mean, f"{raw.error_ratio('mean'):+.1%}"),
            *(now.simulated.mean, error_cell(now.error_ratio("mean"), _ALERT_RATIO)),
        )
        for label, measured, raw, now in figures
    ]
    learned = _say_factors(correction)
    if calibration.frontend_ms:
        more_ms = calibration.frontend_ms
        than = "more" if more_ms > 0 else "less"
        learned += f" The front end takes {abs(more_ms):g} ms {than} than the engine's profile has."
    left_out = f"{correction.left_out_error_ratio:.1%}"
    expected = (
        f"Steps of one kind, predicted from the others, are {left_out} off."
        if len(correction.observations) > 1
        else "One kind of step was seen, so nothing says what it is worth for others."
    )
    return Section(
        title="Calibrated",
        intro=f"{learned} {expected} The run is the one that was learned from: compare another"
        " load before you rely on it. Below is what a scenario of the same server has.",
        table=Table.listed(("", "measured", "raw", "error", "calibrated", "error then"), rows),
        listing=write_calibrated(calibration),
    )


def _say_factors(correction: Correction) -> str:
    factors = {
        group or "all else": f"{factor:.3g}" for group, factor in sorted(correction.factors.items())
    }
    subject = f"Operators' times on {correction.device}"
    if len(set(factors.values())) == 1:
        return f"{subject} are multiplied by {next(iter(factors.values()))}."
    products = ", ".join(f"{name} by {one}" for name, one in factors.items())
    return f"{subject} are multiplied: {products}."


def write_calibrated(calibration: ServingCalibration) -> str:
    """Return the keys of a scenario that make it answer as the run did, as YAML."""
    lines = [f"correction: {calibration.correction.name}"]
    if calibration.frontend_ms:
        frontend_ms = calibration.scenario.engine.rules["frontend_ms"]
        lines += ["engine:", "  rules:", f"    frontend_ms: {frontend_ms}"]
    return "\n".join(lines) + "\n"


def _findings(validation: ServingValidation) -> Section:
    left_out = validation.num_failed + validation.num_unfinished
    facts = [
        Value(
            label=f"{METRICS[item.name].label} mean",
            value=f"{item.error_ratio('mean'):+.1%}",
            note=f"per request {item.mape_ratio:.1%} off" if item.mape_ratio else "",
        )
        for item in validation.metrics
    ]
    intro = (
        f"{validation.num_compared} requests of {validation.run_name} ({validation.source})"
        " compared with their simulation. Errors are simulated over measured, less one."
    )
    if left_out:
        intro += f" {left_out} requests are left out, as they were not completed in both."
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
    return Section(title="Figures", table=Table.listed(headers, rows))


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
        table=Table.listed(
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
        table=Table.listed(
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
        table=Table.listed(("part", "measured (ms)", "simulated (ms)"), decode.parts),
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
    return Section(title="Requests furthest off", table=Table.listed(headers, rows))
