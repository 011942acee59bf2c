"""Draw what a quality report shows, each chart as one SVG text.

Colours that people with any colour vision can tell apart: Okabe and Ito, "Color Universal Design",
2008.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from foretoken.catalog.array import Floats

# Stands for the page's text colour: the SVG says `currentColor` instead, so a figure reads on a
# light and on a dark page.
_INK = "#0b0c0e"
_GREY = "#8f959c"
_SERIES = (
    "#d55e00",
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d8c92f",
    "#4b3f8f",
    "#8c6d1f",
)
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "grid.alpha": 0.14,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "foretoken",
}
_WIDTH_INCHES = 9.0
_DOTS_PER_INCH = 150


@dataclass(frozen=True, kw_only=True, slots=True)
class Cloud:
    """Points of a scatter: the least time their work takes, and the time measured, in µs."""

    least_us: Floats
    latency_us: Floats


def color_tests(tests: Sequence[str]) -> dict[str, str]:
    """Return a colour for every test, the same on all charts."""
    return {test: _SERIES[place % len(_SERIES)] for place, test in enumerate(tests)}


def draw_overview(counts: Mapping[str, Mapping[str, int]], colors: Mapping[str, str]) -> str:
    """Draw a bar per device with its flagged rows by test, on a logarithmic axis of its total.

    `counts` are rows by device and test; a row that two tests doubt counts in both.
    """
    with rc_context(_STYLE):
        height = 1.2 + 0.26 * sum(len(tests) for tests in counts.values())
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots()
        labels, place = [], 0
        for device, tests in counts.items():
            for test, number in sorted(tests.items(), key=lambda item: -item[1]):
                axes.barh(place, number, color=colors[test], height=0.72)
                axes.annotate(
                    f"{number:,}",
                    (number, place),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8.5,
                )
                labels.append(_plain(f"{device}  {test}"))
                place += 1
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xscale("log")
        _label(axes.xaxis)
        axes.set_xlim(left=0.8)
        axes.margins(x=0.12)
        axes.grid(visible=True, axis="x")
        axes.set_xlabel("rows")
        return _to_svg(figure, "overview")


def draw_scatter(
    slug: str, sound: Cloud, doubted: Mapping[str, Cloud], colors: Mapping[str, str]
) -> str:
    """Draw time against work, both logarithmic, with the physical bound and the rows in doubt."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, 4.2), layout="constrained")
        axes = figure.subplots()
        clouds = [
            ("no doubt", sound, _GREY),
            *((n, c, colors.get(n, _SERIES[0])) for n, c in doubted.items()),
        ]
        for label, cloud, color in clouds:
            if len(cloud.least_us):
                axes.scatter(
                    cloud.least_us,
                    cloud.latency_us,
                    s=9,
                    linewidths=0,
                    alpha=0.35 if color == _GREY else 0.75,
                    color=color,
                    label=_plain(f"{label} ({len(cloud.least_us):,})"),
                    rasterized=True,
                )
        ends = _ends([cloud.least_us for _, cloud, _ in clouds])
        axes.plot(ends, ends, color=_INK, linewidth=1.2, linestyle=(0, (4, 3)), label="the bound")
        axes.set_xscale("log")
        axes.set_yscale("log")
        _label(axes.xaxis)
        _label(axes.yaxis)
        axes.grid(visible=True)
        axes.set_xlabel("least time its work takes (µs)")
        axes.set_ylabel("time measured (µs)")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=1.8)
        return _to_svg(figure, slug)


def _label(axis: Any) -> None:
    """Write plain numbers at the powers of ten alone."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_locator(NullLocator())


def _plain(text: str) -> str:
    """Return text that is drawn as it stands; a dollar would begin a formula."""
    return text.replace("$", r"\$")


def _ends(columns: Sequence[Floats]) -> tuple[float, float]:
    values = np.concatenate(columns)
    return float(values.min()), float(values.max())


def _to_svg(figure: Figure, slug: str) -> str:
    """Return the figure as an SVG element that can stand inside a page beside others."""
    file = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(file, format="svg", metadata=metadata, dpi=_DOTS_PER_INCH)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # Ids are unique in a figure only.
    svg = re.sub(r'\bid="', f'id="{slug}-', svg)
    svg = svg.replace('href="#', f'href="#{slug}-').replace("url(#", f"url(#{slug}-")
    return svg.replace(_INK, "currentColor")
