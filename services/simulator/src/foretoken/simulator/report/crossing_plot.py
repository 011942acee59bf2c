"""Draw a table of boxes that are each divided by what they count, as one SVG text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from foretoken.simulator.report.box_grid import LEFT, ROW, BoxGrid
from foretoken.simulator.report.palette import text_color_on

# In units of the picture, which a page scales to its width.
_GAP = 3.0
_LEGEND_ROW = 24.0
_LETTER = 6.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing(BoxGrid):
    """Counts by name where a row and a column meet."""

    counts: Mapping[tuple[str, str], Mapping[str, int]]
    colors: Mapping[str, str]


def draw_crossing(slug: str, crossing: Crossing) -> str:
    """Draw a table of boxes, each divided by what it counts, with the largest count in it."""
    names = {name: None for counts in crossing.counts.values() for name in counts}
    shown = [name for name in crossing.colors if name in names]
    legend = _legend(shown, crossing.colors, crossing.bottom + _LEGEND_ROW)
    return crossing.draw(slug, [*_boxes(crossing), *legend], _LEGEND_ROW + 14)


def _boxes(crossing: Crossing) -> Iterator[str]:
    for box, left, top in crossing.boxes():
        counts = crossing.counts.get(box, {})
        total = sum(counts.values())
        if not total:
            continue
        words = ", ".join(f"{count} {name}" for name, count in counts.items())
        yield f"<g><title>{escape(f'{crossing.name_box(box)}: {words}')}</title>"
        start = left
        for name, color in crossing.colors.items():
            part = (crossing.column_width - _GAP) * counts.get(name, 0) / total
            if part <= 0:
                continue
            yield (
                f'<rect x="{start:.1f}" y="{top:.1f}" width="{part:.1f}"'
                f' height="{ROW - _GAP:g}" fill="{color}"/>'
            )
            text = f"{counts[name]:,}"
            if part > _LETTER * len(text) + 4:
                yield (
                    f'<text x="{start + part / 2:.1f}" y="{top + ROW / 2 + 2.5:.1f}"'
                    f' text-anchor="middle" pointer-events="none"'
                    f' fill="{text_color_on(color)}">{text}</text>'
                )
            start += part
        yield "</g>"


def _legend(names: Sequence[str], colors: Mapping[str, str], y: float) -> Iterator[str]:
    x = LEFT
    for name in names:
        yield f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="14" height="10" fill="{colors[name]}"/>'
        yield f'<text x="{x + 19:.1f}" y="{y:.1f}">{escape(name)}</text>'
        x += 19 + _LETTER * len(name) + 20
