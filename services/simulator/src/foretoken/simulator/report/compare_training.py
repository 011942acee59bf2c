"""The charts of several training steps, training runs or capacities next to each other."""

from collections.abc import Mapping, Sequence

import numpy as np

from foretoken.domain.metrics.metric import largest_first
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.search import CapacityReport
from foretoken.domain.requests.training_run import RunSize, TrainingRunReport
from foretoken.domain.results.training_report import StageMemory, TrainingReport
from foretoken.domain.units import GIB
from foretoken.page.block import Chart, Column
from foretoken.page.chart import Plot
from foretoken.page.curve import draw_intervals, draw_parts
from foretoken.page.section import Section
from foretoken.simulator.report.load_curves import load_charts
from foretoken.simulator.report.palette import OF_MEMORY, OF_STREAM, groups_chart
from foretoken.simulator.report.training_detail import parts_gib, span_chart
from foretoken.simulator.report.training_run_sections import (
    days_by_use,
    days_charts,
    lost_days,
    size_charts,
)
from foretoken.simulator.report.training_search_finalists import device_rules
from foretoken.simulator.report.training_streams import (
    SpanArrays,
    measure_streams,
    pick_stages,
    span_arrays,
)

_MAX_BARS = 8
# More spans than this of a stage are a blur before one zooms.
_MAX_SPANS = 2000
_BOUNDS = "A bar's line is its interval: every operator at its lower, and at its upper, 90 % bound."


def training_charts(reports: Mapping[str, TrainingReport]) -> list[Section]:
    """Return where the time goes, what stages hold and what they do, of every labelled step."""
    timed = {label: report for label, report in reports.items() if report.step_time_ms > 0}
    sections = []
    if timed:
        sections.append(Section(title="Where the time goes", pictures=_time(timed)))
    if any(report.memory for report in reports.values()):
        sections.append(Section(title="Memory", pictures=[_memory(reports)]))
    drawn = {label: report for label, report in timed.items() if len(report.spans.kind)}
    if drawn:
        sections.append(_pipeline(drawn))
    return sections


def training_run_charts(reports: Mapping[str, TrainingRunReport]) -> list[Section]:
    """Return the days with their bounds, what they are spent on, and other numbers of devices."""
    timed = {label: report for label, report in reports.items() if report.days > 0}
    if not timed:
        return []
    days = {label: (r.days_low, r.days, r.days_high) for label, r in timed.items()}
    plot = Plot(title="Expected days with their interval", caption=_BOUNDS)
    charts = [draw_intervals(plot, days, Column.of(METRICS["days"]))]
    charts += days_charts(
        {label: days_by_use(report) for label, report in timed.items()},
        {label: lost_days(report) for label, report in timed.items()},
    )
    sections = [Section(title="Where the days go", pictures=charts)]
    sized = {label: sizes for label, report in timed.items() if (sizes := _sizes(report))}
    if sized:
        sections.append(Section(title="More or fewer devices", pictures=size_charts(sized)))
    return sections


def _sizes(report: TrainingRunReport) -> list[RunSize]:
    """Return the sizes that can run, the fewest devices first."""
    return sorted((size for size in report.sizes if size.days), key=lambda size: size.num_devices)


def capacity_charts(reports: Mapping[str, CapacityReport]) -> list[Section]:
    """Return the rates with their intervals, and the latencies of all runs over the rate."""
    rates = {
        label: (report.low_rps or rate, rate, report.high_rps or rate)
        for label, report in reports.items()
        if (rate := report.capacity_rps) > 0
    }
    charts = []
    if rates:
        caption = "A bar's line is its interval: the workload's chance and the estimates' error."
        plot = Plot(title="Highest rate that meets the targets", caption=caption)
        charts.append(draw_intervals(plot, rates, Column.of(METRICS["capacity_rps"])))
    probes = {
        label: sorted(report.probes, key=lambda probe: probe.rate_rps)
        for label, report in reports.items()
    }
    caption = (
        "Each point is a simulation at that rate; a ring misses a target, or was cut short as its"
        " queue only grew. A line is a limit that all share. An axis is logarithmic where its"
        " values span more than a factor of 40."
    )
    charts += load_charts(probes, caption)
    return [Section(title="Load and latency", pictures=charts)] if charts else []


def _time(reports: Mapping[str, TrainingReport]) -> list[Chart]:
    steps = {
        label: (report.step_time_low_ms, report.step_time_ms, report.step_time_high_ms)
        for label, report in reports.items()
    }
    plot = Plot(title="Step time with its interval", caption=_BOUNDS)
    caption = (
        "GEMM, attention and elementwise are forward and backward together; recompute is the second"
        " forward pass. Communication is what no computation hides; the bubble is waiting for other"
        " stages."
    )
    times_ms = {label: report.step_time_ms_by_group for label, report in reports.items()}
    time = Column(title="time (ms)")
    charts = [
        draw_intervals(plot, steps, Column.of(METRICS["step_time_ms"])),
        groups_chart("Critical stage, one step", times_ms, time, caption),
    ]
    if any(any(report.communication_ms_by_axis.values()) for report in reports.values()):
        charts.append(_communication(reports))
    return charts


def _communication(reports: Mapping[str, TrainingReport]) -> Chart:
    rows = {}
    for axis in largest_first(report.communication_ms_by_axis for report in reports.values()):
        for label, report in reports.items():
            whole_ms = report.communication_ms_by_axis.get(axis, 0.0)
            exposed_ms = min(report.exposed_ms_by_axis.get(axis, 0.0), whole_ms)
            rows[f"{axis}, {label}"] = {
                "exposed communication": exposed_ms,
                "hidden communication": whole_ms - exposed_ms,
            }
    caption = (
        "By the axis of parallelism that communicates. Hidden communication overlaps computation."
    )
    title = "Communication of the critical stage"
    plot = Plot(title=title, caption=caption, colors=OF_STREAM)
    return draw_parts(plot, rows, Column(title="time (ms)"))


def _memory(reports: Mapping[str, TrainingReport]) -> Chart:
    rows, is_cut = {}, False
    for label, report in reports.items():
        shown = _shown_stages(report.memory)
        is_cut |= len(shown) < len(report.memory)
        for stage in shown:
            rows[f"{label}, stage {stage.stage}"] = parts_gib(stage)
    caption = "At the moment each stage holds most, one device of it; what tensors occupy."
    if is_cut:
        caption += f" Drawn are at most {_MAX_BARS} stages of each, with the fullest."
    plot = Plot(
        title="Peak memory of one device",
        caption=caption,
        colors=OF_MEMORY,
        rules=device_rules({report.device_memory_bytes / GIB for report in reports.values()}),
    )
    return draw_parts(plot, rows, Column(title="GiB"))


def _shown_stages(stages: Sequence[StageMemory]) -> Sequence[StageMemory]:
    if len(stages) <= _MAX_BARS:
        return stages
    fullest = min(stages, key=lambda stage: stage.margin_bytes).stage
    numbers = pick_stages([stage.stage for stage in stages], _MAX_BARS - 1)
    return [stage for stage in stages if stage.stage in {*numbers, fullest}]


def _pipeline(reports: Mapping[str, TrainingReport]) -> Section:
    """Return what the critical stage of every step does, all on one scale of time."""
    picked = {label: _critical(report) for label, report in reports.items()}
    drawn = {
        label: spans.pick(np.arange(len(spans.kind)) < _MAX_SPANS)
        for label, spans in picked.items()
    }
    cut = ""
    if any(len(spans.kind) > _MAX_SPANS for spans in picked.values()):
        cut = f" Drawn are the first {_MAX_SPANS:,} spans; the step's own trace has the rest."
    intro = (
        "The stage that waits least, of every run on the same scale of time; what it sends, reduces"
        f" and gathers has a row of its own.{cut}"
    )
    chart = span_chart("The critical stages", drawn, "")
    return Section(title="What the critical stage does", intro=intro, pictures=[chart])


def _critical(report: TrainingReport) -> SpanArrays:
    """Return the spans of the stage that waits least."""
    spans = span_arrays(report.spans)
    streams = measure_streams(spans)
    stage = min(streams, key=lambda number: streams[number]["waiting"])
    return spans.pick(spans.stage == stage)
