"""The pictures of several simulated deployments side by side."""

from collections.abc import Mapping, Sequence

import numpy as np

from foretoken.domain.metrics.metric import largest_first
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.results.report import ITL_QUANTILES, ServingReport
from foretoken.page.figure import SERIES, plain_text
from foretoken.page.section import Picture, Section
from foretoken.simulator.grid import Floats
from foretoken.simulator.report.palette import color_of_group, label_of_group
from foretoken.simulator.report.plots import Series, draw_stacked_rows
from foretoken.simulator.report.serving_detail import DISTRIBUTIONS, latency_quantiles, slo_limits
from foretoken.simulator.report.serving_plots import (
    CumulativePanel,
    Track,
    draw_cumulative_panels,
    draw_tracks,
)

Reports = Mapping[str, ServingReport]

# A picture of more intervals shows no more.
_MAX_INTERVALS = 300
# (name of the axis, column, whether it counts what happens in an interval, whether 0 to 1)
_TRACKS = (
    ("completed/s", "num_completions", True, False),
    ("output tokens/s", "num_output_tokens", True, False),
    ("running requests", "running_mean", False, False),
    ("waiting requests", "waiting_mean", False, False),
    ("batch size", "batch_size_mean", False, False),
    (METRICS["kv_utilization_ratio"].label, "kv_utilization_ratio", False, True),
    (METRICS["utilization_ratio"].label, "utilization_ratio", False, True),
)


def serving_pictures(reports: Reports) -> list[Section]:
    """Return distributions, the runs over time and where steps spend theirs, by label."""
    served = {label: report for label, report in reports.items() if report.num_completed}
    if not served:
        return []
    colors = dict(zip(reports, SERIES, strict=False))
    sections = [_distributions(served, colors)]
    timed = {label: report for label, report in served.items() if len(report.series.start_s)}
    if timed:
        sections.append(_over_time(timed, colors))
    if any(report.step_time_s_by_group for report in served.values()):
        sections.append(_breakdown(served))
    return sections


def _distributions(reports: Reports, colors: Mapping[str, str]) -> Section:
    panels = []
    for metric in DISTRIBUTIONS:
        lines = [
            Series(label=plain_text(label), color=colors[label], values=values)
            for label, report in reports.items()
            if (values := latency_quantiles(report, metric))
        ]
        limits = {slo_limits(report).get(metric.name, 0.0) for report in reports.values()}
        # A limit that is not that of all would be read as theirs.
        limit_ms = limits.pop() if len(limits) == 1 else 0.0
        if lines:
            panels.append(
                CumulativePanel(
                    title=metric.label,
                    x_label=metric.unit,
                    percents=ITL_QUANTILES,
                    lines=lines,
                    limits=[(limit_ms / metric.scale, "SLO")] if limit_ms else [],
                )
            )
    caption = (
        "The share at or below a time; further left is better. An axis is logarithmic where its"
        " values span more than a factor of 40. A dashed line is the objective that all have."
    )
    pictures = []
    if panels:
        svg = draw_cumulative_panels("compare-distributions", panels, "")
        pictures = [Picture(svg=svg, caption=caption)]
    return Section(title="Latencies", pictures=pictures)


def _over_time(reports: Reports, colors: Mapping[str, str]) -> Section:
    width_s = _interval_s(list(reports.values()))
    end_s = max(_end_s(report) for report in reports.values())
    edges = np.arange(0.0, end_s + width_s, width_s)
    tracks: list[Track] = []
    for y_label, column, is_count, is_ratio in _TRACKS:
        series = []
        for label, report in reports.items():
            values = resample(report, column, edges)
            heights = values / width_s if is_count else values
            # The last interval is drawn to its end.
            drawn = [*heights.tolist(), float(heights[-1])]
            # One legend does for all rows.
            name = "" if tracks else plain_text(label)
            series.append(Series(label=name, color=colors[label], values=drawn))
        tracks.append(Track(y_label=y_label, series=series, is_ratio=is_ratio))
    svg = draw_tracks("compare-over-time", "All replicas together", edges.tolist(), tracks)
    caption = (
        f"Every step of a curve is {format_number(width_s)} s: sums of what happened in it, means"
        " of what stood. A curve ends with its run."
    )
    return Section(title="Over time", pictures=[Picture(svg=svg, caption=caption)])


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


def _breakdown(reports: Reports) -> Section:
    groups = largest_first(report.step_time_s_by_group for report in reports.values())
    rows = {
        plain_text(label): {
            label_of_group(group): time_s
            for group, time_s in report.step_time_s_by_group.items()
            if time_s > 0
        }
        for label, report in reports.items()
    }
    svg = draw_stacked_rows(
        "compare-groups",
        "All steps of all engines",
        "time (s)",
        rows,
        {label_of_group(group): color_of_group(group) for group in groups},
    )
    caption = "What the engines were busy with, by operator group."
    return Section(title="Where the time goes", pictures=[Picture(svg=svg, caption=caption)])
