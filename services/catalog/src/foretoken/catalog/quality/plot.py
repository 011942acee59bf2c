"""Draw what a quality report shows, each chart as one SVG text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from foretoken.catalog.array import Floats
from foretoken.page.figure import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    VERMILION,
    WIDTH_INCHES,
    YELLOW,
    figure_to_svg,
    plain_text,
)

_TEST_COLORS = (
    VERMILION,
    BLUE,
    ORANGE,
    GREEN,
    PURPLE,
    SKY,
    YELLOW,
    "#4b3f8f",
    "#8c6d1f",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cloud:
    """Points of a scatter: the least time their work takes, and the time measured, in µs."""

    least_us: Floats
    latency_us: Floats


def color_tests(tests: Sequence[str]) -> dict[str, str]:
    """Return a colour for every test, the same on all charts."""
    return {test: _TEST_COLORS[place % len(_TEST_COLORS)] for place, test in enumerate(tests)}


def draw_overview(counts: Mapping[str, Mapping[str, int]], colors: Mapping[str, str]) -> str:
    """Draw a bar per device with its flagged rows by test, on a logarithmic axis of its total.

    `counts` are rows by device and test; a row that two tests flag counts in both.
    """
    with rc_context(STYLE):
        height = 1.2 + 0.26 * sum(len(tests) for tests in counts.values())
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
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
                labels.append(plain_text(f"{device}  {test}"))
                place += 1
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xscale("log")
        _label(axes.xaxis)
        axes.set_xlim(left=0.8)
        axes.margins(x=0.12)
        axes.grid(visible=True, axis="x")
        axes.set_xlabel("rows")
        return figure_to_svg(figure, "overview")


def draw_scatter(
    slug: str, sound: Cloud, flagged: Mapping[str, Cloud], colors: Mapping[str, str]
) -> str:
    """Draw time against work, both logarithmic, with the physical bound and the flagged rows."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 4.2), layout="constrained")
        axes = figure.subplots()
        clouds = [
            ("not flagged", sound, GREY),
            *((n, c, colors.get(n, _TEST_COLORS[0])) for n, c in flagged.items()),
        ]
        for label, cloud, color in clouds:
            if len(cloud.least_us):
                axes.scatter(
                    cloud.least_us,
                    cloud.latency_us,
                    s=9,
                    linewidths=0,
                    alpha=0.35 if color == GREY else 0.75,
                    color=color,
                    label=plain_text(f"{label} ({len(cloud.least_us):,})"),
                    rasterized=True,
                )
        ends = _ends([cloud.least_us for _, cloud, _ in clouds])
        axes.plot(ends, ends, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label="the bound")
        axes.set_xscale("log")
        axes.set_yscale("log")
        _label(axes.xaxis)
        _label(axes.yaxis)
        axes.grid(visible=True)
        axes.set_xlabel("least time its work takes (µs)")
        axes.set_ylabel("time measured (µs)")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=1.8)
        return figure_to_svg(figure, slug)


def _label(axis: Any) -> None:
    """Write plain numbers at the powers of ten alone."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_locator(NullLocator())


def _ends(columns: Sequence[Floats]) -> tuple[float, float]:
    values = np.concatenate(columns)
    return float(values.min()), float(values.max())
