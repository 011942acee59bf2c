"""The charts of several simulated deployments next to each other."""

from collections.abc import Mapping, Sequence

import numpy as np

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.results.report import ServingReport
from foretoken.page.block import Column
from foretoken.page.chart import SERIES, Plot
from foretoken.page.curve import Curve, draw_curves
from foretoken.page.section import Section
from foretoken.simulator.grid import Floats
from foretoken.simulator.report.palette import groups_chart
from foretoken.simulator.report.serving_detail import TIME_S, TRACK_HEIGHT, cumulative_charts

Reports = Mapping[str, ServingReport]

# A picture of more intervals shows no more.
_MAX_INTERVALS = 300
# (title, column, whether it counts what happens in an interval, unit)
_TRACKS = (
    ("completed/s", "num_completions", True, ""),
    ("output tokens/s", "num_output_tokens", True, ""),
    ("running requests", "running_mean", False, ""),
    ("waiting requests", "waiting_mean", False, ""),
    ("batch size", "batch_size_mean", False, ""),
    (METRICS["kv_utilization_ratio"].label, "kv_utilization_ratio", False, SHARE),
    (METRICS["utilization_ratio"].label, "utilization_ratio", False, SHARE),
)


def serving_charts(reports: Reports) -> list[Section]:
    """Return distributions, the runs over time and where steps spend theirs, by label."""
    colors = dict(zip(reports, SERIES, strict=False))
    served = {label: report for label, report in reports.items() if report.num_completed}
    if not served:
        return []
    found = {label: (report, colors[label]) for label, report in served.items()}
    sections = [Section(title="Latencies", pictures=cumulative_charts(found))]
    timed = {label: report for label, report in served.items() if len(report.series.start_s)}
    if timed:
        sections.append(_over_time(timed, colors))
    times_s = {label: report.step_time_s_by_group for label, report in served.items()}
    if any(times_s.values()):
        caption = "What the engines were busy with, by operator group."
        chart = groups_chart("All steps of all engines", times_s, Column(title="time (s)"), caption)
        sections.append(Section(title="Where the time goes", pictures=[chart]))
    return sections


def _over_time(reports: Reports, colors: Mapping[str, str]) -> Section:
    width_s = _interval_s(list(reports.values()))
    end_s = max(_end_s(report) for report in reports.values())
    edges = np.arange(0.0, end_s + width_s, width_s)
    charts = []
    for title, column, is_count, unit in _TRACKS:
        curves = []
        for label, report in reports.items():
            values = resample(report, column, edges) / (width_s if is_count else 1.0)
            # A curve ends with its run.
            kept = np.isfinite(values)
            x, y = edges[:-1][kept].tolist(), values[kept].tolist()
            curves.append(Curve(label=label, x=x, y=y, color=colors[label]))
        plot = Plot(title=title, height=TRACK_HEIGHT)
        value = Column(title=title, name="value", unit=unit)
        charts.append(draw_curves(plot, curves, x=TIME_S, y=value, is_step=True))
    intro = (
        f"All replicas together. Every step of a curve is {format_number(width_s)} s: sums of what"
        " happened in it, means of what stood. A curve ends with its run."
    )
    return Section(title="Over time", intro=intro, pictures=charts)


def _interval_s(reports: Sequence[ServingReport]) -> float:
    """Return the width of intervals that all runs can be drawn in: a multiple of the widest's."""
    widest_s = max(_width_s(report) for report in reports)
    longest_s = max(_end_s(report) for report in reports)
    return widest_s * max(-(-longest_s // (widest_s * _MAX_INTERVALS)), 1.0)


def _width_s(report: ServingReport) -> float:
    starts = report.series.start_s
    return float(starts[1] - starts[0]) if len(starts) > 1 else 1.0


def _end_s(report: ServingReport) -> float:
    return float(report.series.start_s[-1]) + _width_s(report)


def resample(report: ServingReport, column: str, edges: Floats) -> Floats:
    """Return sums of a count, means of what else a column has, between edges; NaN after the run.

    An interval of the run counts where it begins.
    """
    starts = np.asarray(report.series.start_s, dtype=np.float64)
    values = np.asarray(getattr(report.series, column), dtype=np.float64)
    places = np.searchsorted(edges, starts, side="right") - 1
    num_bins = len(edges) - 1
    sums = np.bincount(places, weights=values, minlength=num_bins)
    counts = np.bincount(places, minlength=num_bins)
    means = sums if column.startswith("num_") else sums / np.maximum(counts, 1)
    return np.where(edges[:-1] < _end_s(report), means, np.nan)
