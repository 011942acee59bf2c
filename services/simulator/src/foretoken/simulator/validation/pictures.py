"""The pictures that the pages of comparisons have of two runs."""

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from foretoken.domain.metrics.number_text import format_number
from foretoken.page.figure import BLUE, GREY, STYLE, WIDTH_INCHES, figure_to_svg
from foretoken.simulator.grid import Floats

# A logarithmic axis pays once the values span this ratio.
_LOG_RATIO = 40.0
# More dots than this only hide each other.
_MAX_DOTS = 4000


def draw_shares(
    slug: str, x_label: str, series: Mapping[str, Sequence[float]], colors: Sequence[str]
) -> str:
    """Draw the share of values at or below x, one step line per series."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 3.5), layout="constrained")
        axes = figure.subplots()
        for (label, values), color in zip(series.items(), colors, strict=True):
            ordered = sorted(values)
            shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
            axes.step(ordered, shares, where="post", label=label, color=color, linewidth=1.7)
        everything = [value for values in series.values() for value in values if value > 0]
        if everything and max(everything) > _LOG_RATIO * min(everything):
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_number_formatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_ylim(0, 1.02)
        axes.grid(visible=True, axis="both")
        axes.set_xlabel(x_label)
        axes.set_ylabel("share of requests")
        axes.legend(loc="lower right")
        return figure_to_svg(figure, slug)


def draw_pairs(slug: str, label: str, measured: Floats, simulated: Floats) -> str:
    """Draw a dot per request, measured against simulated, and the line where they agree."""
    step = max(1, len(measured) // _MAX_DOTS)
    highest = float(max(measured.max(), simulated.max(), 1e-9))
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, highest], [0, highest], color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.scatter(measured[::step], simulated[::step], s=9, color=BLUE, alpha=0.55, linewidths=0)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(_number_formatter())
        axes.set(xlim=(0, highest * 1.03), ylim=(0, highest * 1.03))
        axes.grid(visible=True, axis="both")
        axes.set_xlabel(f"{label}, measured")
        axes.set_ylabel("simulated")
        return figure_to_svg(figure, slug)


def _number_formatter() -> FuncFormatter:
    return FuncFormatter(lambda value, _: format_number(value))
