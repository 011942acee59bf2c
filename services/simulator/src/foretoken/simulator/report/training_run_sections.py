"""The sections of a page about a whole training run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain import schema
from foretoken.domain.metrics.metric import SHARE, title_of
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.training_run import RunSize, TrainingRunReport, TrainingRunRequest
from foretoken.domain.units import MS_PER_S, S_PER_DAY, S_PER_HOUR
from foretoken.page.block import Chart, Column, Table, Value
from foretoken.page.chart import BLUE, GREY, ORANGE, PURPLE, VERMILION, Plot, Rule
from foretoken.page.curve import Curve, draw_curves, draw_intervals, draw_parts
from foretoken.page.section import Section
from foretoken.simulator.report.palette import BOUNDS_CAPTION, describe_interval
from foretoken.simulator.report.question import configuration_section, refusal, remark_sections
from foretoken.simulator.training.run.failures import FailureModel
from foretoken.simulator.training.run.plan import model_failures

_S_PER_MINUTE = 60.0
_GIGA = 1e9
_KWH_PER_MWH = 1e3
# Intervals from a thirtieth of the chosen one to thirty times as long.
_REACH = 30.0
_NUM_INTERVALS = 61
# How much more and less often machines could fail than said.
_RATES = ((0.5, "failures half as often"), (1.0, "as said"), (2.0, "twice as often"))
NEW_STEPS = "new steps"
# A run by itself has no name.
_THE_RUN = "the run"
# What the expected days are spent on: the share of them, and the colour.
_USES = {
    NEW_STEPS: ("goodput_ratio", BLUE),
    "waiting for checkpoints": ("checkpoint_ratio", ORANGE),
    "steps done again": ("repeated_ratio", VERMILION),
    "restarts": ("restart_ratio", PURPLE),
    "waiting for other sites": ("sites_ratio", GREY),
}
_COLORS = {name: color for name, (_, color) in _USES.items()}


def training_run_sections(report: TrainingRunReport) -> list[Section]:
    """Return overview, where the days go, checkpoints, sizes, remarks and the request."""
    request = schema.decode(TrainingRunRequest, json.loads(report.request_json))
    sections = [_overview(report, request)]
    if report.days > 0:
        sections.append(_days({_THE_RUN: report}))
    if report.num_failures > 0:
        sections.append(_checkpoints(report, request))
    if any(size.days for size in report.sizes):
        sections.append(_sizes(report, request))
    sections += remark_sections(report.notes)
    return [*sections, configuration_section(report.request_json)]


def training_run_charts(reports: Mapping[str, TrainingRunReport]) -> list[Section]:
    """Return the days with their bounds, what they are spent on, and other numbers of devices."""
    timed = {label: report for label, report in reports.items() if report.days > 0}
    sections = [_days(timed)] if timed else []
    if any(size.days for report in timed.values() for size in report.sizes):
        pictures = _size_charts(timed)
        sections.append(Section(title="More or fewer devices", pictures=pictures))
    return sections


def _overview(report: TrainingRunReport, request: TrainingRunRequest) -> Section:
    devices = f"{report.num_devices:,} {request.scenario.device}"
    return Section(
        title="The run",
        intro=(
            f"{request.scenario.model.name} on {devices}: {report.num_tokens:.4g} tokens are"
            f" {report.num_steps:,.0f} steps of {report.step_time_ms / MS_PER_S:.4g} s. Nothing is"
            " said of the loss."
            + (f" Prices: {report.price_source}." if report.usd_per_hour else "")
        ),
        warning=refusal("run cannot be", report.feasibility),
        facts=_facts(report, request) if report.days > 0 else (),
    )


def _facts(report: TrainingRunReport, request: TrainingRunRequest) -> list[Value]:
    days = (
        f"{describe_interval(report.days_low, report.days_high, '')} by the step's interval;"
        f" nine runs of ten end by day {format_number(report.days_spread.p90)}"
    )
    ideal = f"{format_number(report.ideal_days)} days without interruptions"
    facts = [Value.of("days", report, days), Value.of("goodput_ratio", report, ideal)]
    if report.num_failures:
        checkpoints = (
            f"a checkpoint of {format_number(report.checkpoint_bytes / _GIGA)} GB every"
            f" {format_number(report.checkpoint_interval_s / _S_PER_MINUTE)} min"
        )
        facts.append(Value.of("num_failures", report, checkpoints))
    if report.usd:
        prices = (
            f"{format_number(report.usd_per_step)} a step,"
            f" {format_number(report.usd_per_hour)} an hour of a GPU"
        )
        facts.append(Value.of("usd", report, prices))
    energy, hours = report.energy_kwh / _KWH_PER_MWH, f"{report.device_hours:,.0f}"
    note = f"{hours} {METRICS['device_hours'].label}"
    facts.append(Value(label="energy", value=energy, unit="MWh", note=note))
    if request.target_days:
        label = f"devices for {request.target_days:g} days"
        found = report.target_devices or "none"
        facts.append(Value(label=label, value=found, note="with the same batch"))
    return facts


def _days(reports: Mapping[str, TrainingRunReport]) -> Section:
    """Return the days of runs by what they are spent on, all of them and those that are lost."""
    days = {
        label: {
            name: ratio * report.days
            for name, (share, _) in _USES.items()
            if (ratio := getattr(report, share)) > 0
        }
        for label, report in reports.items()
    }
    lost = {
        label: {name: value for name, value in of_run.items() if name != NEW_STEPS}
        for label, of_run in days.items()
    }
    unit = Column(title="days")
    charts = []
    if len(reports) > 1:
        bounds = {label: (r.days_low, r.days, r.days_high) for label, r in reports.items()}
        plot = Plot(title="Expected days with their interval", caption=BOUNDS_CAPTION)
        charts.append(draw_intervals(plot, bounds, Column.of(METRICS["days"])))
    caption = "The expected days by what they are spent on."
    plot = Plot(title="The expected days", caption=caption, colors=_COLORS)
    charts.append(draw_parts(plot, days, unit))
    if any(lost.values()):
        caption = "The same without the steps that count."
        plot = Plot(title="What is lost", caption=caption, colors=_COLORS)
        charts.append(draw_parts(plot, lost, unit))
    rows = [
        (*([label] if len(reports) > 1 else []), name, format_number(value), f"{value / all_:.2%}")
        for label, of_run in days.items()
        for all_ in (reports[label].days,)
        for name, value in of_run.items()
    ]
    named = ("run", "spent on") if len(reports) > 1 else ("",)
    table = Table.listed(
        headers=(*named, "days", "share"), rows=rows, text_columns=range(len(named))
    )
    return Section(title="Where the days go", pictures=charts, table=table)


def _checkpoints(report: TrainingRunReport, request: TrainingRunRequest) -> Section:
    model = model_failures(request.scenario, request)
    chosen_s = report.checkpoint_interval_s
    low_s = max(chosen_s / _REACH, report.step_time_ms / MS_PER_S, model.shortest_s)
    intervals = np.geomspace(low_s, max(low_s * 2, chosen_s * _REACH), _NUM_INTERVALS)
    minutes = (intervals / _S_PER_MINUTE).tolist()
    curves = [
        Curve(
            label=label,
            x=minutes,
            y=[
                _goodput(replace(model, rate_per_s=factor * model.rate_per_s), report, s)
                for s in intervals
            ],
            is_dashed=factor != 1,
        )
        for factor, label in _RATES
    ]
    chosen_min = chosen_s / _S_PER_MINUTE
    plot = Plot(
        title="Goodput by the interval of checkpoints",
        caption="Often: training waits for checkpoints. Seldom: more steps are done again. The"
        " dashed lines are what a wrong guess of the failures would do.",
        rules=[Rule("x", chosen_min, f"{format_number(chosen_min)} min")],
        is_near=True,
    )
    x = Column(title="training between checkpoints (min)", name="interval_min")
    goodput = Column(title=METRICS["goodput_ratio"].label, name="goodput_ratio", unit=SHARE)
    between_h = 1 / model.rate_per_s / S_PER_HOUR
    return Section(
        title="Checkpoints",
        intro=(
            f"The run fails every {format_number(between_h)} h. A checkpoint takes"
            f" {format_number(report.checkpoint_s)} s to write, and training waits"
            f" {format_number(model.stall_s)} s for it."
        ),
        pictures=[draw_curves(plot, curves, x=x, y=goodput)],
    )


def _goodput(model: FailureModel, report: TrainingRunReport, interval_s: float) -> float:
    """Return the share of new steps with another interval."""
    ideal_s = report.ideal_days * S_PER_DAY
    work_s = ideal_s + report.sites_ratio * report.days * S_PER_DAY
    if not model.can_end(min(interval_s, work_s)):
        return 0.0
    return ideal_s / model.expect_run(work_s, interval_s).total_s


def _sizes(report: TrainingRunReport, request: TrainingRunRequest) -> Section:
    target = request.target_days
    rules = [Rule("y", target, f"{target:g} days")] if target else []
    fewest = f"{report.target_devices:,} devices are the fewest that are done in {target:g} days"
    none = f"No number of devices is done in {target:g} days with this batch."
    found = f"{fewest}, in the mean." if report.target_devices else none
    return Section(
        title="More or fewer devices",
        intro=found if target else "",
        pictures=_size_charts({_THE_RUN: report}, rules),
        table=_size_table(report, request),
    )


def _size_charts(
    reports: Mapping[str, TrainingRunReport], rules: Sequence[Rule] = ()
) -> list[Chart]:
    """Return days, and cost where it is known, over the number of devices, by run."""
    caption = "The same batch over more replicas: each does less between sums of gradients."
    sizes = {
        label: sorted((size for size in r.sizes if size.days), key=lambda size: size.num_devices)
        for label, r in reports.items()
    }
    charts = []
    for title, name, marked in (("Days", "days", rules), ("Cost", "usd", ())):
        curves = [
            Curve(
                label=label,
                x=[size.num_devices for size in of_run],
                y=[getattr(size, name) for size in of_run],
            )
            for label, of_run in sizes.items()
            if any(getattr(size, name) for size in of_run)
        ]
        if curves:
            plot = Plot(title=f"{title} by devices", caption=caption, rules=marked)
            y = Column(title=name.upper() if name == "usd" else name)
            charts.append(draw_curves(plot, curves, x=Column(title="devices"), y=y))
    return charts


def _size_table(report: TrainingRunReport, request: TrainingRunRequest) -> Table:
    last = "in time" if request.target_days else "cannot run"
    return Table.of(
        report.sizes,
        Column.words(METRICS["num_devices"].label, read=lambda size: f"{size.num_devices:,}"),
        Column(title="dp"),
        Column(
            title=title_of(METRICS["step_time_ms"].label, "s"),
            read=lambda size: size.step_time_ms / MS_PER_S,
        ),
        _known(METRICS["goodput_ratio"].label, "goodput_ratio", "{:.1%}"),
        *(_known("days", "days", "{:.3g}"), _known("USD", "usd", "{:,.0f}")),
        Column.words(last, read=lambda size: size.reason or ("yes" if size.is_enough else "")),
    )


def _known(title: str, name: str, pattern: str) -> Column:
    """Return the column of a figure, a dash where a run of that size cannot be."""

    def read(size: RunSize) -> str:
        value = getattr(size, name)
        return pattern.format(value) if size.days and value else "-"

    return Column(title=title, name=name, read=read)
