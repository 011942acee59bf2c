"""Draw curves of a training step over time, each as one SVG text."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import NDArray

from foretoken.page.figure import INK, STYLE, WIDTH_INCHES, figure_to_svg
from foretoken.simulator.report.palette import colors_of_loads

# A curve with more points than this has lost nothing that can be seen.
_MAX_POINTS = 600
# Curves that span less than this share of an axis are shown once more on their own.
_SMALL_SHARE = 0.4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Staircase:
    """A quantity that keeps each of its values from its time on, until the next."""

    times: NDArray[np.float64]
    values: NDArray[np.float64]

    def thin(self, most: int = _MAX_POINTS) -> "Staircase":
        """Return the lowest and highest values of `most / 2` parts of the time, if it has more."""
        if len(self.times) <= most:
            return self
        edges = np.linspace(0, len(self.times), most // 2 + 1).astype(int)
        kept = []
        for first, last in pairwise(edges.tolist()):
            part = self.values[first:last]
            kept += sorted({first + int(part.argmin()), first + int(part.argmax())})
        chosen = np.array(kept)
        return Staircase(times=self.times[chosen], values=self.values[chosen])


def draw_staircases(
    slug: str,
    labels: tuple[str, str, str],
    curves: Mapping[str, Staircase],
    end: float,
    limit: tuple[float, str] | None = None,
) -> str:
    """Draw curves from 0 to `end`; `labels` are the title and the names of x and y.

    `limit` is a marked value with its name. Where the curves move little on an axis that starts at
    zero and reaches the limit, a second picture below shows them alone.
    """
    title, x_label, y_label = labels
    lowest = min((float(curve.values.min()) for curve in curves.values()), default=0.0)
    highest = max((float(curve.values.max()) for curve in curves.values()), default=1.0)
    top = max(highest, limit[0] if limit else 0.0)
    ranges = [(0.0, 1.1 * top)]
    if 0 < highest - lowest < _SMALL_SHARE * top:
        margin = 0.08 * (highest - lowest)
        ranges.append((lowest - margin, highest + margin))
    with rc_context(STYLE):
        size = (WIDTH_INCHES, 1.2 + 2.3 * len(ranges))
        figure = Figure(figsize=size, layout="constrained")
        all_axes = figure.subplots(len(ranges), 1, squeeze=False, sharex=True)[:, 0]
        for axes, limits in zip(all_axes, ranges, strict=True):
            _draw_curves(axes, curves, end)
            axes.set_ylim(*limits)
            axes.set_ylabel(y_label)
        if limit is not None:
            all_axes[0].axhline(limit[0], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
            all_axes[0].annotate(
                limit[1], (0.0, limit[0]), xytext=(4, 3), textcoords="offset points", fontsize=9
            )
        all_axes[0].set_title(title)
        all_axes[-1].set_xlabel(x_label)
        if len(curves) > 1:
            handles, names = all_axes[0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=min(len(curves), 8))
        return figure_to_svg(figure, slug)


def _draw_curves(axes: Any, curves: Mapping[str, Staircase], end: float) -> None:
    colors = colors_of_loads(max(len(curves), 1))
    for (label, curve), color in zip(curves.items(), colors, strict=False):
        thin = curve.thin()
        axes.step(
            np.append(thin.times, end),
            np.append(thin.values, thin.values[-1]),
            where="post",
            label=label,
            color=color,
            linewidth=1.2,
        )
    axes.set_xlim(0, end)
    # As many digits as neighbouring ticks need to differ.
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.grid(visible=True, axis="y")
