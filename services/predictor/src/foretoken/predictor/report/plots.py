"""Draw the charts of a training report, each as one SVG text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from foretoken.domain.results.report import OperatorTrainingReport, SplitScore
from foretoken.page.figure import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SERIES,
    STYLE,
    VERMILION,
    WIDTH_INCHES,
    YELLOW,
    figure_to_svg,
    plain_text,
)
from foretoken.predictor.report.chance import NOMINAL_COVERAGE_RATIO, coverage_by_chance
from foretoken.predictor.report.scoring import resample_errors

# Shape in addition to colour, so that a print in grey can be read.
_LOOKS: Mapping[str, tuple[str, str]] = {
    "inside": (BLUE, "o"),
    "gap": (GREEN, "s"),
    "new configuration": (ORANGE, "D"),
    "beyond": (VERMILION, "^"),
}
_DASHED = (0, (4, 3))
_P90 = 0.9
_ROW_INCHES = 0.26
# Errors smaller than this are the noise of measuring; a logarithmic axis needs an end.
_LEAST_ERROR_RATIO = 1e-3
# The size of a dot for few points held out, and how it grows with their number.
_LEAST_AREA, _AREA_PER_OCTAVE = 10.0, 4.5
_OF_MEMBERS = (*SERIES, YELLOW, GREY)


def draw_errors(splits: Sequence[SplitScore]) -> str:
    """Draw the share of points by signed error, and by its size, a line per split."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 3.7), layout="constrained")
        signed, size = figure.subplots(1, 2, sharey=True)
        for score in splits:
            color, marker = _LOOKS[score.split]
            errors = resample_errors(score)
            levels = np.linspace(0.0, 1.0, len(errors))
            looks = {"color": color, "marker": marker, "markevery": len(errors) // 10}
            signed.plot(errors, levels, label=score.split, **looks)
            sizes = np.sort(np.abs(errors))
            # Beyond its P90 the size of an error is known from the worst points alone.
            is_drawn = (levels <= _P90) & (sizes >= _LEAST_ERROR_RATIO)
            size.plot(sizes[is_drawn], levels[is_drawn], color=color)
        _draw_signed_axis(signed, splits)
        size.axhline(_P90, color=INK, linewidth=1.0, linestyle=_DASHED)
        size.annotate("P90", (0, _P90), (4, 3), textcoords="offset points",
                      xycoords=("axes fraction", "data"), fontsize=8.5)  # fmt: skip
        size.set_title("How far off?")
        size.set_xlabel("size of the error")
        _make_logarithmic(size)
        for axes in (signed, size):
            axes.set_ylim(0, 1.01)
            axes.yaxis.set_major_formatter(_percent())
            axes.grid(visible=True)
        signed.set_ylabel("share of held-out points")
        figure.legend(loc="outside lower center", ncols=len(_LOOKS))
        return figure_to_svg(figure, "errors")


def draw_coverage(reports: Sequence[OperatorTrainingReport], pooled: Sequence[SplitScore]) -> str:
    """Draw how often the truth was in the interval: a dot per operator, and all together."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 1.2 + 0.55 * len(pooled)), layout="constrained")
        axes = figure.subplots()
        for row, total in enumerate(pooled):
            color, marker = _LOOKS[total.split]
            low, high = coverage_by_chance(total.num_held_out)
            axes.barh(row, high - low, left=low, height=0.8, color=GREY, alpha=0.35)
            scores = [s for r in reports for s in r.splits if s.split == total.split]
            axes.scatter(
                [score.interval_coverage_ratio for score in scores],
                row + _spread(len(scores)),
                s=[_area(score.num_held_out) for score in scores],
                color=color,
                marker=marker,
                alpha=0.55,
                linewidths=0,
            )
            axes.plot([total.interval_coverage_ratio] * 2, [row - 0.42, row + 0.42], color=INK,
                      linewidth=2.6, solid_capstyle="butt")  # fmt: skip
        axes.axvline(NOMINAL_COVERAGE_RATIO, color=INK, linewidth=1.0, linestyle=_DASHED)
        axes.set_yticks(range(len(pooled)), [score.split for score in pooled])
        axes.set_xlim(right=1.005)
        axes.xaxis.set_major_formatter(_percent())
        axes.set_xlabel("share of truths in their 90 % interval")
        _finish_rows(axes, len(pooled))
        return figure_to_svg(figure, "coverage")


def draw_operators(reports: Sequence[OperatorTrainingReport]) -> str:
    """Draw the mean error of every split, a row per operator, in the order given."""
    with rc_context(STYLE):
        figure = _rows_figure(len(reports))
        axes = figure.subplots()
        for row, report in enumerate(reports):
            errors = [max(score.mape_ratio, _LEAST_ERROR_RATIO) for score in report.splits]
            axes.plot([min(errors), max(errors)], [row, row], color=GREY, linewidth=1.2, zorder=2)
            for score, error in zip(report.splits, errors, strict=True):
                color, marker = _LOOKS[score.split]
                axes.plot(error, row, marker, color=color, markersize=5.5, markeredgewidth=0)
        for split, (color, marker) in _LOOKS.items():
            axes.plot([], [], marker, color=color, label=split)
        _make_logarithmic(axes)
        axes.set_xlabel("mean error (MAPE)")
        axes.set_yticks(range(len(reports)), [name_of(report) for report in reports])
        _finish_rows(axes, len(reports))
        figure.legend(loc="outside lower center", ncols=len(_LOOKS))
        return figure_to_svg(figure, "operators")


def draw_members(reports: Sequence[OperatorTrainingReport]) -> str:
    """Draw what share each way of estimating has, a bar per operator, in the order given."""
    names = sorted({name for report in reports for name in report.member_weights})
    with rc_context(STYLE):
        figure = _rows_figure(len(reports))
        axes = figure.subplots()
        left = np.zeros(len(reports))
        for place, name in enumerate(names):
            widths = np.array([report.member_weights.get(name, 0.0) for report in reports])
            axes.barh(range(len(reports)), widths, left=left, height=0.7, label=plain_text(name),
                      color=_OF_MEMBERS[place % len(_OF_MEMBERS)])  # fmt: skip
            left += widths
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(_percent())
        axes.set_xlabel("share in the answers inside the grid")
        axes.set_yticks(range(len(reports)), [name_of(report) for report in reports])
        _finish_rows(axes, len(reports))
        figure.legend(loc="outside lower center", ncols=min(len(names), 6))
        return figure_to_svg(figure, "members")


def name_of(report: OperatorTrainingReport) -> str:
    """Return how a row of a chart is called."""
    return plain_text(f"{report.operator}  {report.device}")


def _draw_signed_axis(axes: Any, splits: Sequence[SplitScore]) -> None:
    """Show the middle nine tenths of the widest split; the rest would squeeze the lines."""
    inner = [score.error_quantiles_ratio[place] for score in splits for place in (1, -2)]
    reach = 1.15 * max((abs(error) for error in inner), default=1.0)
    axes.set_xlim(-reach, reach)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.axvline(0.0, color=INK, linewidth=1.0, linestyle=_DASHED)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{100 * value:+.3g} %" if value else "0")
    )
    axes.set_title("Too fast, or too slow?")
    axes.set_xlabel("estimate over truth, less one")


def _make_logarithmic(axes: Any) -> None:
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    # More than two decades of 1, 2 and 5 would not fit side by side.
    digits = (1, 2, 5) if high < 100 * low else (1,)
    ticks = [digit * 10.0**power for power in range(-4, 4) for digit in digits]
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_percent())


def _percent() -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{100 * value:.3g} %")


def _rows_figure(num_rows: int) -> Figure:
    return Figure(figsize=(WIDTH_INCHES, 1.1 + _ROW_INCHES * num_rows), layout="constrained")


def _finish_rows(axes: Any, num_rows: int) -> None:
    axes.set_ylim(num_rows - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")


def _spread(number: int) -> Any:
    """Return offsets that keep equal dots apart, the same each time."""
    # The golden ratio's multiples fill an interval evenly however many there are.
    return (np.arange(number) * 0.6180339887498949 % 1.0 - 0.5) * 0.6 if number > 1 else 0.0


def _area(num_points: int) -> float:
    return _LEAST_AREA + _AREA_PER_OCTAVE * float(np.log2(max(num_points, 1)))
