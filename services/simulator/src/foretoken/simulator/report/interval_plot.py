"""Draw values with their intervals below each other, as one SVG text."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from foretoken.domain.metrics.number_text import format_number
from foretoken.page.figure import INK, STYLE, WIDTH_INCHES, figure_to_svg, plain_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A value between its bounds."""

    label: str
    low: float
    value: float
    high: float
    color: str


def draw_intervals(slug: str, title: str, x_label: str, intervals: Sequence[Interval]) -> str:
    """Draw a bar from bound to bound per interval, with a tick at its value."""
    reach = max([interval.high for interval in intervals], default=1.0)
    with rc_context(STYLE):
        size = (WIDTH_INCHES, 1.2 + 0.33 * len(intervals))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        for row, interval in enumerate(intervals):
            width = interval.high - interval.low
            axes.barh(row, width, left=interval.low, height=0.5, color=interval.color, alpha=0.55)
            axes.plot(interval.value, row, "|", color=INK, markersize=13, markeredgewidth=2)
            axes.annotate(
                format_number(interval.value),
                (interval.high, row),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
            )
        names = [plain_text(interval.label) for interval in intervals]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, reach * 1.12)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(visible=True, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
        axes.set_title(title)
        axes.set_xlabel(x_label)
        return figure_to_svg(figure, slug)
