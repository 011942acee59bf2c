"""The pictures of several capacities side by side."""

from collections.abc import Mapping

from foretoken.domain.metrics.registry import ATTAINMENT, describe_limit
from foretoken.domain.requests.search import CapacityReport
from foretoken.page.figure import SERIES
from foretoken.page.section import Picture, Section
from foretoken.simulator.report.interval_plot import Interval, draw_intervals
from foretoken.simulator.report.search_candidates import curve_of, limits_of
from foretoken.simulator.report.search_plots import Curve, CurvePanel, draw_curves

Reports = Mapping[str, CapacityReport]


def capacity_pictures(reports: Reports) -> list[Section]:
    """Return the rates with their intervals, and the latencies of all runs over the rate."""
    colors = dict(zip(reports, SERIES, strict=False))
    intervals = [
        Interval(
            label=label,
            low=report.low_rps or report.capacity_rps,
            value=report.capacity_rps,
            high=report.high_rps or report.capacity_rps,
            color=colors[label],
        )
        for label, report in reports.items()
        if report.capacity_rps > 0
    ]
    pictures = []
    if intervals:
        title = "Highest rate that meets the targets"
        svg = draw_intervals("compare-capacities", title, "requests/s", intervals)
        caption = "The bar is the interval: the workload's chance and the estimates' error."
        pictures.append(Picture(svg=svg, caption=caption))
    panels = _panels(reports, colors)
    if panels:
        pictures.append(
            Picture(
                svg=draw_curves("compare-load", panels),
                caption=(
                    "Each point is a simulation at that rate; a ring misses a target, or was cut"
                    " short as its queue only grew. A line is a limit that all share. An axis is"
                    " logarithmic where its values span more than a factor of 40."
                ),
            )
        )
    return [Section(title="Load and latency", pictures=pictures)] if pictures else []


def _panels(reports: Reports, colors: Mapping[str, str]) -> list[CurvePanel]:
    limits: dict[tuple[str, float], set[float]] = {}
    for report in reports.values():
        for key, limit in limits_of(report.probes).items():
            limits.setdefault(key, set()).add(limit)
    panels = []
    for (metric, percentile), of_all in limits.items():
        limit = of_all.pop() if len(of_all) == 1 else 0.0
        curves = [
            curve
            for label, report in reports.items()
            if (curve := _curve(report, label, (metric, percentile), colors[label])).x
        ]
        panels.append(
            CurvePanel(
                title=describe_limit(metric, percentile),
                x_label="requests/s",
                y_label="share of requests" if metric == ATTAINMENT else "ms",
                curves=curves,
                limit=(limit, "at least" if metric == ATTAINMENT else "limit") if limit else None,
                is_ratio=metric == ATTAINMENT,
            )
        )
    return panels


def _curve(report: CapacityReport, label: str, limit: tuple[str, float], color: str) -> Curve:
    by_rate = sorted(report.probes, key=lambda probe: probe.rate_rps)
    points = curve_of(by_rate, *limit)
    return Curve(
        label=label,
        x=[probe.rate_rps for probe, _ in points],
        y=[value for _, value in points],
        color=color,
        is_hollow=[not probe.is_met or probe.is_cut_short for probe, _ in points],
    )
