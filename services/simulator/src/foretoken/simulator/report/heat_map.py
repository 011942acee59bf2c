"""Draw a table of coloured boxes, as one SVG text; pointing at a box shows its details.

Every function takes plain numbers with their labels; none knows what they mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite

from foretoken.page.figure import GREY
from foretoken.simulator.report.number_text import format_number
from foretoken.simulator.report.palette import text_color_on

# In units of the picture, which a page scales to its width.
_WIDTH = 1000.0
_LEFT = 128.0
_TOP = 52.0
_ROW = 34.0
_GAP = 2.0
_MAX_COLUMN = 120.0
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
class HeatMap:
    """Values where a row and a column meet; `details` are shown where a box is pointed at.

    A pair without a value that has details is grey, with `absent` in it; one without either is
    left out. The box of the largest value is framed.
    """

    title: str
    row_label: str
    column_label: str
    unit: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Mapping[tuple[str, str], float]
    details: Mapping[tuple[str, str], str]
    absent: str = "none"


def draw_heat_map(slug: str, plot: HeatMap) -> str:
    """Draw the boxes, with a scale of their colours below."""
    width = min((_WIDTH - _LEFT - 10) / max(len(plot.columns), 1), _MAX_COLUMN)
    bottom = _TOP + _ROW * len(plot.rows)
    finite = [value for value in plot.values.values() if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} '
            f'{bottom + _LEGEND:g}" role="img" id="{slug}"'
            ' font-family="DejaVu Sans, sans-serif" font-size="11" fill="currentColor">'
        ),
        (
            f'<text x="{_LEFT:g}" y="14" font-size="12.5" font-weight="bold">'
            f"{escape(plot.title)}</text>"
        ),
        (
            f'<text x="{_LEFT - 9:g}" y="43" text-anchor="end" opacity="0.75">'
            f"{escape(plot.row_label)}</text>"
        ),
        f'<text x="{_LEFT:g}" y="30" opacity="0.75">{escape(plot.column_label)}</text>',
        *_headers(plot, width),
        *_boxes(plot, width, (low, high)),
        *_scale(plot, bottom + 16, (low, high)),
        "</svg>",
    ]
    return "\n".join(parts)


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


def _headers(plot: HeatMap, width: float) -> Iterator[str]:
    for place, name in enumerate(plot.columns):
        x = _LEFT + (place + 0.5) * width
        yield f'<text x="{x:.1f}" y="46" text-anchor="middle">{escape(name)}</text>'
    for place, name in enumerate(plot.rows):
        y = _TOP + (place + 0.5) * _ROW + 4
        yield f'<text x="{_LEFT - 9:g}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>'


def _boxes(plot: HeatMap, width: float, bounds: tuple[float, float]) -> Iterator[str]:
    best = max(plot.values, key=plot.values.__getitem__, default=None)
    for row, row_name in enumerate(plot.rows):
        for column, column_name in enumerate(plot.columns):
            pair = (row_name, column_name)
            if pair not in plot.values and pair not in plot.details:
                continue
            value = plot.values.get(pair)
            color = GREY if value is None else shade(_share(value, bounds))
            text = plot.absent if value is None else format_number(value)
            place = f"{plot.row_label} {row_name}, {plot.column_label} {column_name}"
            left, top = _LEFT + column * width, _TOP + row * _ROW
            frame = ' stroke="currentColor" stroke-width="2.4"' if pair == best else ""
            faint = ' fill-opacity="0.35"' if value is None else ""
            ink = "currentColor" if value is None else text_color_on(color)
            yield (
                f"<g><title>{escape(f'{place}: {plot.details.get(pair, text)}')}</title>"
                f'<rect x="{left + 1:.1f}" y="{top + 1:.1f}" width="{width - _GAP:.1f}"'
                f' height="{_ROW - _GAP:g}" fill="{color}"{faint}{frame}/>'
                f'<text x="{left + width / 2:.1f}" y="{top + _ROW / 2 + 4:.1f}"'
                f' text-anchor="middle" pointer-events="none" fill="{ink}">{escape(text)}</text>'
                "</g>"
            )


def _scale(plot: HeatMap, top: float, bounds: tuple[float, float]) -> Iterator[str]:
    if not plot.values:
        return
    step = _SCALE_WIDTH / _NUM_SHADES
    for place in range(_NUM_SHADES):
        yield (
            f'<rect x="{_LEFT + place * step:.2f}" y="{top:g}" width="{step + 0.3:.2f}"'
            f' height="10" fill="{shade(place / (_NUM_SHADES - 1))}"/>'
        )
    low, high = (format_number(bound) for bound in bounds)
    yield f'<text x="{_LEFT:g}" y="{top + 25:g}">{low}</text>'
    yield (
        f'<text x="{_LEFT + _SCALE_WIDTH:g}" y="{top + 25:g}" text-anchor="end">{high}</text>'
        f'<text x="{_LEFT + _SCALE_WIDTH + 12:g}" y="{top + 9:g}" opacity="0.75">'
        f"{escape(plot.unit)}</text>"
    )
