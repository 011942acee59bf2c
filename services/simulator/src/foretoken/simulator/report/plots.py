"""Draw the charts of a page, each as one SVG text.

Every function takes plain numbers with their labels and units; none knows what they mean.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from foretoken.domain.metrics.number_text import format_number
from foretoken.page.figure import GREY, INK, SERIES, STYLE, WIDTH_INCHES, figure_to_svg
from foretoken.simulator.report.palette import text_color_on

# A logarithmic axis pays once the values span this ratio.
_LOG_RATIO = 40.0
# Boxes and segments narrower than these shares of the width carry no text.
_MIN_LABEL_SHARE = 0.045
_MAX_LEGEND_COLUMNS = 8
# One row below a figure has room for so many letters; the colour of a name takes some too.
_MAX_LEGEND_LETTERS = 100
_LEGEND_LETTERS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line: values over the panel's x; `color` and `dashes` default by position."""

    label: str
    values: Sequence[float]
    color: str = ""
    is_dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One set of axes with lines from zero; `may_be_log` lets y be logarithmic if it spans much."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    series: Sequence[Series]
    may_be_log: bool = False


def draw_panels(slug: str, panels: Sequence[Panel]) -> str:
    """Draw line charts side by side, with one legend where all have the same series."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 3.5), layout="constrained")
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw_lines(axes, panel)
        labels = {tuple(item.label for item in panel.series) for panel in panels}
        if len(labels) == 1:
            _add_legend(figure)
        else:
            for axes, panel in zip(all_axes, panels, strict=True):
                if len(panel.series) > 1:
                    axes.legend(loc="best")
        return figure_to_svg(figure, slug)


def _draw_lines(axes: Any, panel: Panel) -> None:
    positive = [value for item in panel.series for value in item.values if value > 0]
    for index, item in enumerate(panel.series):
        axes.plot(
            panel.x,
            item.values,
            label=item.label,
            color=item.color or SERIES[index % len(SERIES)],
            linestyle=(0, (4, 3)) if item.is_dashed else "-",
            marker="" if item.is_dashed else "o",
            linewidth=1.2 if item.is_dashed else None,
        )
    if panel.may_be_log and positive and max(positive) > _LOG_RATIO * min(positive):
        axes.set_yscale("log")
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0, top=max(positive, default=1.0) * 1.08)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axes.set_xlim(left=0, right=max(panel.x) * 1.05)
    axes.grid(visible=True, axis="y")
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)


def draw_stacked_rows(
    slug: str,
    title: str,
    x_label: str,
    rows: Mapping[str, Mapping[str, float]],
    colors: Mapping[str, str],
    limit: tuple[float, str] | None = None,
) -> str:
    """Draw a horizontal stacked bar per row; `limit` is a marked value with its name."""
    totals = [sum(parts.values()) for parts in rows.values()]
    reach = max([*totals, limit[0] if limit else 0.0, 1e-12])
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 1.5 + 0.42 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for label, color in colors.items():
            widths = [parts.get(label, 0.0) for parts in rows.values()]
            if not any(widths):
                continue
            offsets = [_sum_before(parts, label, colors) for parts in rows.values()]
            axes.barh(range(len(rows)), widths, left=offsets, height=0.64, color=color, label=label)
            for row, (width, offset) in enumerate(zip(widths, offsets, strict=True)):
                if width > _MIN_LABEL_SHARE * reach:
                    _write_inside(axes, offset + width / 2, row, format_number(width), color)
        if limit is not None:
            axes.axvline(limit[0], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.annotate(
                limit[1],
                (limit[0], 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                fontsize=9,
            )
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, reach * 1.03)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
        _finish_rows(axes, title, x_label)
        _add_legend(figure)
        return figure_to_svg(figure, slug)


def draw_ranked(
    slug: str, title: str, unit: str, values: Mapping[str, float], colors: Mapping[str, str]
) -> str:
    """Draw one bar per name, largest first, each with its value and share written next to it."""
    ordered = sorted(values.items(), key=lambda item: -item[1])
    total = sum(values.values()) or 1.0
    reach = max([value for _, value in ordered] or [1.0])
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 1.2 + 0.31 * len(ordered)), layout="constrained")
        axes = figure.subplots()
        for row, (name, value) in enumerate(ordered):
            axes.barh(row, value, height=0.66, color=colors.get(name, GREY))
            text = f"{format_number(value)} {unit}   {value / total:.1%}"
            axes.annotate(
                text, (value, row), xytext=(5, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(range(len(ordered)), [name for name, _ in ordered])
        axes.set_ylim(len(ordered) - 0.4, -0.6)
        axes.set_xlim(0, reach * 1.2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
        _finish_rows(axes, title, f"time ({unit})")
        return figure_to_svg(figure, slug)


def _write_inside(axes: Any, x: float, y: float, text: str, background: str) -> None:
    color = text_color_on(background)
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=color)


def _add_legend(figure: Figure) -> None:
    """Put all names in one row below, or in more where one is too long."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    num_letters = sum(len(name) + _LEGEND_LETTERS for name in names)
    num_rows = max(-(-len(names) // _MAX_LEGEND_COLUMNS), -(-num_letters // _MAX_LEGEND_LETTERS), 1)
    num_columns = -(-len(names) // num_rows)
    figure.legend(handles, names, loc="outside lower center", ncols=num_columns)


def _finish_rows(axes: Any, title: str, x_label: str) -> None:
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(visible=True, axis="x")
    axes.set_title(title)
    axes.set_xlabel(x_label)


def _sum_before(parts: Mapping[str, float], label: str, order: Iterable[str]) -> float:
    total = 0.0
    for name in order:
        if name == label:
            break
        total += parts.get(name, 0.0)
    return total
