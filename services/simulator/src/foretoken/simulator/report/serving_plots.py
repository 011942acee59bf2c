"""Draw the charts of a serving page that a training page has no use for, each as one SVG text.

Every function takes plain numbers with their labels and units; none knows what they mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from foretoken.domain.metrics.number_text import format_number
from foretoken.page.figure import BLUE, INK, STYLE, WIDTH_INCHES, figure_to_svg
from foretoken.simulator.report.plots import Series

# A logarithmic axis pays once the values span this ratio.
_LOG_RATIO = 40.0
_PANELS_PER_ROW = 2
_PANEL_INCHES = 2.7
_TRACK_INCHES = 1.45


@dataclass(frozen=True, kw_only=True, slots=True)
class CumulativePanel:
    """Shares of values at or below x. A line's `values` are its quantiles at `percents`.

    `limits` are marked values with their names.
    """

    title: str
    x_label: str
    percents: Sequence[float]
    lines: Sequence[Series]
    limits: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Track:
    """One row of curves over time; those of `is_area` are filled down to zero.

    Values that are not numbers leave a gap. Without names there is no legend.
    """

    y_label: str
    series: Sequence[Series]
    is_area: bool = False
    is_ratio: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """A histogram: the share in each range between neighbouring edges."""

    title: str
    x_label: str
    edges: Sequence[float]
    shares: Sequence[float]


def draw_cumulative_panels(slug: str, panels: Sequence[CumulativePanel], legend: str) -> str:
    """Draw cumulative distributions, two panels a row, under one legend with a title."""
    num_rows = -(-len(panels) // _PANELS_PER_ROW)
    with rc_context(STYLE):
        size = (WIDTH_INCHES, 0.5 + _PANEL_INCHES * num_rows)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(num_rows, _PANELS_PER_ROW, squeeze=False).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_cumulative(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        if len(panels[0].lines) > 1:
            _add_legend(figure, legend)
        return figure_to_svg(figure, slug)


def _draw_cumulative(axes: Any, panel: CumulativePanel) -> None:
    positive = [value for line in panel.lines for value in line.values if value > 0]
    shares = [percent / 100 for percent in panel.percents]
    for line in panel.lines:
        axes.plot(line.values, shares, label=line.label, color=line.color, linewidth=1.7)
    for limit, name in panel.limits:
        axes.axvline(limit, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
        axes.annotate(
            name,
            (limit, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=8.5,
            rotation=90,
            va="bottom",
        )
    reach = [*positive, *(limit for limit, _ in panel.limits)]
    if positive and max(positive) > _LOG_RATIO * min(positive):
        axes.set_xscale("log")
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0, right=max(reach, default=1.0) * 1.05)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.grid(visible=True, axis="both")
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)


def draw_tracks(slug: str, title: str, times_s: Sequence[float], tracks: Sequence[Track]) -> str:
    """Draw curves over one time axis, a row of axes per track."""
    with rc_context(STYLE):
        size = (WIDTH_INCHES, 0.7 + _TRACK_INCHES * len(tracks))
        figure = Figure(figsize=size, layout="constrained")
        rows = figure.subplots(len(tracks), 1, sharex=True, squeeze=False)[:, 0]
        for axes, track in zip(rows, tracks, strict=True):
            _draw_track(axes, times_s, track)
        rows[0].set_title(title)
        rows[-1].set_xlabel("time (s)")
        rows[-1].set_xlim(times_s[0], times_s[-1])
        figure.align_ylabels(rows)
        return figure_to_svg(figure, slug)


def _draw_track(axes: Any, times_s: Sequence[float], track: Track) -> None:
    highest = 0.0
    for line in track.series:
        if track.is_area:
            axes.fill_between(
                times_s, line.values, step="post", color=line.color, alpha=0.35, linewidth=0
            )
        axes.step(
            times_s, line.values, where="post", label=line.label, color=line.color, linewidth=1.2
        )
        highest = max(highest, *line.values)
    axes.set_ylim(0, 1.02 if track.is_ratio else highest * 1.08 or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    as_text = "{:.0%}".format if track.is_ratio else format_number
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: as_text(value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axes.grid(visible=True, axis="y")
    axes.set_ylabel(track.y_label)
    if sum(bool(line.label) for line in track.series) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.94), ncols=len(track.series))


def draw_histograms(slug: str, histograms: Sequence[Bars]) -> str:
    """Draw histograms side by side."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 2.9), layout="constrained")
        all_axes = figure.subplots(1, len(histograms), squeeze=False)[0]
        for axes, bars in zip(all_axes, histograms, strict=True):
            _draw_bars(axes, bars)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
            axes.grid(visible=True, axis="y")
            axes.set_title(bars.title)
            axes.set_xlabel(bars.x_label)
            axes.set_ylabel("share of steps")
        return figure_to_svg(figure, slug)


def _draw_bars(axes: Any, bars: Bars) -> None:
    widths = [upper - lower for lower, upper in pairwise(bars.edges)]
    if max(widths, default=1.0) == 1:
        # A range of whole numbers that holds one of them is drawn around it.
        left = [edge - 0.5 for edge in bars.edges[:-1]]
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    else:
        # Ranges that widen look alike on a logarithmic axis, which has no 0.
        edges = [max(edge, 0.5) for edge in bars.edges]
        left, widths = edges[:-1], [upper - lower for lower, upper in pairwise(edges)]
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.bar(left, bars.shares, widths, align="edge", color=BLUE, linewidth=0)


def _add_legend(figure: Figure, title: str) -> None:
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 8), title=title)
