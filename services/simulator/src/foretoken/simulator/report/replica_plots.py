"""Draw what the replicas of a cluster did, each picture as one SVG text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from foretoken.domain.metrics.number_text import format_number
from foretoken.page.figure import INK, STYLE, WIDTH_INCHES, figure_to_svg

_ROW_INCHES = 0.24
_MOST_INCHES = 9.0
_MOST_NAMED_ROWS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class LifeLine:
    """A row of spans (start, end, state) on a time axis; `marks` are instants that stand out."""

    label: str
    spans: Sequence[tuple[float, float, str]]
    marks: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BarRow:
    """One value for each of several things, in [0, 1], with the colour of each."""

    title: str
    values: Sequence[float]
    colors: Sequence[str]


def draw_life_lines(
    slug: str, title: str, lines: Sequence[LifeLine], colors: Mapping[str, str], mark: str
) -> str:
    """Draw rows of coloured spans over time in s; `mark` names what the crosses mean."""
    with rc_context(STYLE):
        height = 1.3 + min(_ROW_INCHES * len(lines), _MOST_INCHES)
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots()
        for row, line in enumerate(lines):
            for start, end, state in line.spans:
                axes.broken_barh(
                    [(start, end - start)], (row - 0.36, 0.72), color=colors[state], linewidth=0
                )
            axes.plot(line.marks, [row] * len(line.marks), "x", color=INK, markersize=5)
        names = [line.label for line in lines]
        axes.set_yticks(*_ticks(names))
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
        axes.set_title(title)
        axes.set_xlabel("time (s)")
        axes.grid(visible=True, axis="x")
        seen = {state for line in lines for *_, state in line.spans}
        handles: list[Any] = [
            Patch(color=color, label=state) for state, color in colors.items() if state in seen
        ]
        if any(line.marks for line in lines):
            handles += axes.plot([], [], "x", color=INK, markersize=5, label=mark)
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        return figure_to_svg(figure, slug)


def draw_bar_rows(
    slug: str, rows: Sequence[BarRow], names: Sequence[str], legend: Mapping[str, str]
) -> str:
    """Draw a chart of bars per row, one bar per thing, which `names` name."""
    with rc_context(STYLE):
        size = (WIDTH_INCHES, 0.9 + 1.7 * len(rows))
        figure = Figure(figsize=size, layout="constrained")
        all_axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
        for axes, row in zip(all_axes, rows, strict=True):
            axes.bar(range(len(names)), row.values, color=row.colors, width=0.8, linewidth=0)
            axes.set_ylim(0, max(*row.values, 0.01) * 1.1)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
            axes.set_title(row.title)
            axes.grid(visible=True, axis="y")
        places, labels = _ticks(names)
        all_axes[-1].set_xticks(places, labels)
        all_axes[-1].set_xlabel("replica")
        if len(legend) > 1:
            handles = [Patch(color=color, label=name) for name, color in legend.items()]
            figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8))
        return figure_to_svg(figure, slug)


def _ticks(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return where to name which row: all, or as many as are legible."""
    stride = -(-len(names) // _MOST_NAMED_ROWS)
    places = list(range(0, len(names), max(stride, 1)))
    return places, [names[place] for place in places]
