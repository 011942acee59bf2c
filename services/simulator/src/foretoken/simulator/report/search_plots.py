"""Draw the charts of a search's page, each as one SVG text.

Every function takes plain numbers with their labels and units; none knows what they mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from foretoken.domain.metrics.number_text import format_number
from foretoken.page.figure import (
    BLUE,
    GREEN,
    GREY,
    INK,
    STYLE,
    VERMILION,
    WIDTH_INCHES,
    figure_to_svg,
    plain_text,
)

_LOG_RATIO = 40.0
_PANELS_PER_ROW = 2
_PANEL_INCHES = 3.1
_LEGEND_INCHES = 0.24
_MAX_LEGEND_LETTERS = 100
_LEGEND_LETTERS = 7
# A smaller share would be written as none at all.
_LEAST_SHARE = 0.0005
_DASHES = (0, (4, 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Values at places; those of `is_hollow` are drawn as rings."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    is_hollow: Sequence[bool] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePanel:
    """Curves of their own x; a `limit` of y has a line and a name, a `band` of x is shaded."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    limit: tuple[float, str] | None = None
    band: tuple[float, float] | None = None
    marked_x: float | None = None
    is_ratio: bool = False


def draw_curves(slug: str, panels: Sequence[CurvePanel]) -> str:
    """Draw the panels, two a row, under one legend of all curves."""
    num_rows = -(-len(panels) // _PANELS_PER_ROW)
    num_columns = min(len(panels), _PANELS_PER_ROW)
    names = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    num_letters = sum(len(name) + _LEGEND_LETTERS for name in names)
    num_lines = min(-(-num_letters // _MAX_LEGEND_LETTERS), len(names)) if len(names) > 1 else 0
    with rc_context(STYLE):
        size = (WIDTH_INCHES, _PANEL_INCHES * num_rows + _LEGEND_INCHES * num_lines)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        if num_lines:
            handles = {
                name: handle
                for axes in grid[: len(panels)]
                for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
            }
            columns = -(-len(names) // num_lines)
            figure.legend(
                [handles[plain_text(name)] for name in names],
                [plain_text(name) for name in names],
                loc="outside lower center",
                ncols=columns,
            )
        return figure_to_svg(figure, slug)


def _draw_panel(axes: Any, panel: CurvePanel) -> None:
    if panel.band is not None:
        axes.axvspan(*panel.band, color=BLUE, alpha=0.16, linewidth=0)
    if panel.marked_x is not None:
        axes.axvline(panel.marked_x, color=BLUE, linewidth=1.2)
    for curve in panel.curves:
        axes.plot(curve.x, curve.y, label=plain_text(curve.label), color=curve.color, linewidth=1.6)
        hollow = list(curve.is_hollow) or [False] * len(curve.x)
        for x, y, is_hollow in zip(curve.x, curve.y, hollow, strict=True):
            face = "none" if is_hollow else curve.color
            axes.plot(x, y, "o", color=curve.color, markerfacecolor=face, markersize=5)
    values = [value for curve in panel.curves for value in curve.y if value > 0]
    reach = [*values, *([panel.limit[0]] if panel.limit else [])]
    if panel.limit is not None:
        axes.axhline(panel.limit[0], color=INK, linewidth=1.1, linestyle=_DASHES)
        axes.annotate(
            plain_text(panel.limit[1]),
            (0.0, panel.limit[0]),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8.5,
        )
    _scale_axes(axes, panel, reach)
    axes.grid(visible=True, axis="both")
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)


def _scale_axes(axes: Any, panel: CurvePanel, reach: Sequence[float]) -> None:
    if panel.is_ratio:
        axes.set_ylim(0, 1.04)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    else:
        if reach and max(reach) > _LOG_RATIO * min(reach):
            axes.set_yscale("log")
            axes.minorticks_off()
        else:
            axes.set_ylim(bottom=0, top=max(reach, default=1.0) * 1.12)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    places = [x for curve in panel.curves for x in curve.x]
    axes.set_xlim(left=0, right=max([*places, *(panel.band or ())], default=1.0) * 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))


def draw_counts(
    slug: str,
    title: str,
    x_label: str,
    counts: Mapping[str, int],
    colors: Mapping[str, str],
    total: int = 0,
) -> str:
    """Draw one bar per name in the given order, each with its count and share next to it.

    Shares are parts of `total` (0: of their sum).
    """
    total = total or sum(counts.values()) or 1
    reach = max([*counts.values(), 1])
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 1.2 + 0.31 * len(counts)), layout="constrained")
        axes = figure.subplots()
        for row, (name, count) in enumerate(counts.items()):
            axes.barh(row, count, height=0.66, color=colors.get(name, GREY))
            axes.annotate(
                f"{count:,} ({_describe_share(count / total)})",
                (count, row),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
            )
        _name_rows(axes, list(counts))
        axes.set_xlim(0, reach * 1.18)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_title(title)
        axes.set_xlabel(x_label)
        return figure_to_svg(figure, slug)


def _describe_share(share: float) -> str:
    return "<0.1%" if 0 < share < _LEAST_SHARE else f"{share:.1%}"


def draw_changes(slug: str, title: str, x_label: str, ratios: Mapping[str, float]) -> str:
    """Draw how far a quantity is from what it was: bars from 1 to each ratio."""
    reach = max([abs(ratio - 1) for ratio in ratios.values()] + [0.02])
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 1.2 + 0.33 * len(ratios)), layout="constrained")
        axes = figure.subplots()
        for row, ratio in enumerate(ratios.values()):
            is_gain = ratio >= 1
            axes.barh(row, ratio - 1, left=1, height=0.66, color=GREEN if is_gain else VERMILION)
            axes.annotate(
                f"{ratio - 1:+.1%}",
                (ratio, row),
                xytext=(5 if is_gain else -5, 0),
                textcoords="offset points",
                va="center",
                ha="left" if is_gain else "right",
            )
        axes.axvline(1, color=INK, linewidth=0.9)
        _name_rows(axes, [plain_text(name) for name in ratios])
        axes.set_xlim(1 - reach * 1.25, 1 + reach * 1.25)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}x"))
        axes.set_title(title)
        axes.set_xlabel(x_label)
        return figure_to_svg(figure, slug)


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")
