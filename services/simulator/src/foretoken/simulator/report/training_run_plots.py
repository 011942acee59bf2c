"""Draw the charts of a whole run's page, each as one SVG text.

Every function takes plain numbers with their labels and units; none knows what they mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from foretoken.domain.metrics.number_text import format_number
from foretoken.page.figure import INK, SERIES, STYLE, WIDTH_INCHES, figure_to_svg

_DASHES = (0, (4, 3))
_TICKS = (1.0, 2.0, 5.0)
# More values than this are a curve, fewer are points with a tick each.
_MAX_POINTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Values over the x of its chart, or over an `x` of its own; `color` is one of a palette."""

    label: str
    y: Sequence[float]
    is_dashed: bool = False
    x: Sequence[float] = ()
    color: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogChart:
    """Lines over a logarithmic x; `mark` is a place of x with its name, `limit` one of y."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    lines: Sequence[Line]
    mark: tuple[float, str] | None = None
    limit: tuple[float, str] | None = None
    starts_at_zero: bool = True


def draw_charts(slug: str, charts: Sequence[LogChart]) -> str:
    """Draw charts side by side."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        all_axes = figure.subplots(1, len(charts), squeeze=False)[0]
        for axes, chart in zip(all_axes, charts, strict=True):
            _draw_chart(axes, chart)
        return figure_to_svg(figure, slug)


def _draw_chart(axes: Any, chart: LogChart) -> None:
    are_points = len(chart.x) <= _MAX_POINTS
    for index, line in enumerate(chart.lines):
        axes.plot(
            line.x or chart.x,
            line.y,
            label=line.label,
            color=line.color or SERIES[index % len(SERIES)],
            linestyle=_DASHES if line.is_dashed else "-",
            marker="o" if are_points else "",
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(
        FixedLocator(list(chart.x)) if are_points else LogLocator(subs=_TICKS)
    )
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    if chart.starts_at_zero:
        axes.set_ylim(bottom=0)
    if chart.mark is not None:
        axes.axvline(chart.mark[0], color=INK, linewidth=1.2, linestyle=_DASHES)
        _annotate(axes, chart.mark[1], (chart.mark[0], 0.03), ("data", "axes fraction"))
    if chart.limit is not None:
        axes.axhline(chart.limit[0], color=INK, linewidth=1.2, linestyle=_DASHES)
        _annotate(axes, chart.limit[1], (0.01, chart.limit[0]), ("axes fraction", "data"))
    if len(chart.lines) > 1:
        axes.legend(loc="best")
    axes.grid(visible=True, axis="y")
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)


def _annotate(axes: Any, text: str, place: tuple[float, float], system: tuple[str, str]) -> None:
    axes.annotate(
        text,
        place,
        xycoords=system,
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=9,
    )
