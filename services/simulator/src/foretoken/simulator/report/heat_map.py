"""Draw a table of coloured boxes, as one SVG text; pointing at a box shows its details.

Every function takes plain numbers with their labels; none knows what they mean.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from math import isfinite

from foretoken.domain.metrics.number_text import format_number
from foretoken.page.figure import GREY
from foretoken.simulator.report.box_grid import LEFT, ROW, BoxGrid
from foretoken.simulator.report.palette import text_color_on

# In units of the picture, which a page scales to its width.
_GAP = 2.0
_LEGEND = 54.0
_SCALE_WIDTH = 260.0
_NUM_SHADES = 48
# Dark to light, evenly in lightness. Source: matplotlib's viridis (van der Walt and Smith, 2015),
# at every eighth of its length.
_VIRIDIS = (
    *("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30"),
    "#fde725",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap(BoxGrid):
    """Values where a row and a column meet; `details` are shown where a box is pointed at.

    A pair without a value that has details is grey, with `absent` in it; one without either is
    left out. The box of the largest value is framed.
    """

    unit: str
    values: Mapping[tuple[str, str], float]
    details: Mapping[tuple[str, str], str]
    absent: str = "none"


def draw_heat_map(slug: str, plot: HeatMap) -> str:
    """Draw the boxes, with a scale of their colours below."""
    finite = [value for value in plot.values.values() if isfinite(value)]
    bounds = min(finite, default=0.0), max(finite, default=1.0)
    parts = [*_boxes(plot, bounds), *_scale(plot, plot.bottom + 16, bounds)]
    return plot.draw(slug, parts, _LEGEND)


def shade(share: float) -> str:
    """Return the colour of a share from 0 (dark) to 1 (light); those outside are at the ends."""
    place = min(max(share, 0.0), 1.0) * (len(_VIRIDIS) - 1)
    before = min(int(place), len(_VIRIDIS) - 2)
    rest = place - before
    pairs = zip(_parts(_VIRIDIS[before]), _parts(_VIRIDIS[before + 1]), strict=True)
    return "#" + "".join(f"{round(one + (other - one) * rest):02x}" for one, other in pairs)


def _parts(color: str) -> tuple[int, ...]:
    return tuple(int(color[start : start + 2], 16) for start in (1, 3, 5))


def _share(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return (value - low) / (high - low) if high > low else 1.0


def _boxes(plot: HeatMap, bounds: tuple[float, float]) -> Iterator[str]:
    best = max(plot.values, key=plot.values.__getitem__, default=None)
    width = plot.column_width
    for pair, left, top in plot.boxes():
        if pair not in plot.values and pair not in plot.details:
            continue
        value = plot.values.get(pair)
        color = GREY if value is None else shade(_share(value, bounds))
        text = plot.absent if value is None else format_number(value)
        details = f"{plot.name_box(pair)}: {plot.details.get(pair, text)}"
        frame = ' stroke="currentColor" stroke-width="2.4"' if pair == best else ""
        faint = ' fill-opacity="0.35"' if value is None else ""
        ink = "currentColor" if value is None else text_color_on(color)
        yield (
            f"<g><title>{escape(details)}</title>"
            f'<rect x="{left + 1:.1f}" y="{top + 1:.1f}" width="{width - _GAP:.1f}"'
            f' height="{ROW - _GAP:g}" fill="{color}"{faint}{frame}/>'
            f'<text x="{left + width / 2:.1f}" y="{top + ROW / 2 + 4:.1f}"'
            f' text-anchor="middle" pointer-events="none" fill="{ink}">{escape(text)}</text>'
            "</g>"
        )


def _scale(plot: HeatMap, top: float, bounds: tuple[float, float]) -> Iterator[str]:
    if not plot.values:
        return
    step = _SCALE_WIDTH / _NUM_SHADES
    for place in range(_NUM_SHADES):
        yield (
            f'<rect x="{LEFT + place * step:.2f}" y="{top:g}" width="{step + 0.3:.2f}"'
            f' height="10" fill="{shade(place / (_NUM_SHADES - 1))}"/>'
        )
    low, high = (format_number(bound) for bound in bounds)
    yield f'<text x="{LEFT:g}" y="{top + 25:g}">{low}</text>'
    yield (
        f'<text x="{LEFT + _SCALE_WIDTH:g}" y="{top + 25:g}" text-anchor="end">{high}</text>'
        f'<text x="{LEFT + _SCALE_WIDTH + 12:g}" y="{top + 9:g}" opacity="0.75">'
        f"{escape(plot.unit)}</text>"
    )
