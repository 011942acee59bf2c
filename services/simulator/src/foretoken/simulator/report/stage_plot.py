"""Draw rows of boxes of different kinds and widths below each other, as one SVG text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from foretoken.simulator.report.palette import text_color_on

# In units of the picture, which a page scales to its width.
_WIDTH = 1000.0
_NAME_WIDTH = 330.0
_TOP = 28.0
_ROW = 30.0
_GAP = 2.0
_LETTER = 6.8
_LEGEND = 34.0
_MAX_NAME = 46


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A box: `kind` colours it, `width` is in units of its row."""

    kind: str
    width: float
    label: str = ""


def draw_stages(
    slug: str, title: str, rows: Mapping[str, Sequence[Stage]], colors: Mapping[str, str]
) -> str:
    """Draw each row over the whole width; pointing at a box shows its kind."""
    height = _TOP + _ROW * len(rows) + _LEGEND
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}"'
            f' role="img" id="{slug}" font-family="DejaVu Sans, sans-serif" font-size="11"'
            ' fill="currentColor">'
        ),
        f'<text x="0" y="14" font-size="12.5" font-weight="bold">{escape(title)}</text>',
    ]
    for place, (name, stages) in enumerate(rows.items()):
        top = _TOP + place * _ROW
        shown = name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
        parts.append(
            f'<text x="{_NAME_WIDTH - 10:g}" y="{top + _ROW / 2 + 4:.1f}" text-anchor="end">'
            f"<title>{escape(name)}</title>{escape(shown)}</text>"
        )
        parts += _boxes(stages, top, colors)
    parts += _legend(colors, _TOP + _ROW * len(rows) + 20)
    parts.append("</svg>")
    return "\n".join(parts)


def _boxes(stages: Sequence[Stage], top: float, colors: Mapping[str, str]) -> Iterator[str]:
    unit = (_WIDTH - _NAME_WIDTH) / (sum(stage.width for stage in stages) or 1.0)
    left = _NAME_WIDTH
    for place, stage in enumerate(stages):
        width = max(stage.width * unit - _GAP, 0.5)
        color = colors[stage.kind]
        words = f"stage {place}: {stage.kind}" + (f", {stage.label}" if stage.label else "")
        yield (
            f"<g><title>{escape(words)}</title>"
            f'<rect x="{left:.1f}" y="{top + 2:.1f}" width="{width:.1f}"'
            f' height="{_ROW - 6:g}" fill="{color}"/>'
        )
        if stage.label and width > _LETTER * len(stage.label) + 2:
            yield (
                f'<text x="{left + width / 2:.1f}" y="{top + _ROW / 2 + 3:.1f}"'
                f' text-anchor="middle" pointer-events="none" fill="{text_color_on(color)}">'
                f"{escape(stage.label)}</text>"
            )
        yield "</g>"
        left += stage.width * unit


def _legend(colors: Mapping[str, str], y: float) -> Iterator[str]:
    x = _NAME_WIDTH
    for name, color in colors.items():
        yield f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="14" height="10" fill="{color}"/>'
        yield f'<text x="{x + 19:.1f}" y="{y:.1f}">{escape(name)}</text>'
        x += 19 + _LETTER * len(name) + 20
