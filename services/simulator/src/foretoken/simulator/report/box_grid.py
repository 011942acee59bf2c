"""Draw the frame of a table of boxes, as one SVG text: its title, and the names around it.

What is in the boxes is drawn by those who use it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

# In units of the picture, which a page scales to its width.
_WIDTH = 1000.0
LEFT = 128.0
ROW = 34.0
_TOP = 52.0
_MAX_COLUMN = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxGrid:
    """Rows and columns by their names; a box is where two meet."""

    title: str
    row_label: str
    column_label: str
    rows: Sequence[str]
    columns: Sequence[str]

    @property
    def column_width(self) -> float:
        """The width of a column."""
        return min((_WIDTH - LEFT - 10) / max(len(self.columns), 1), _MAX_COLUMN)

    @property
    def bottom(self) -> float:
        """Where the last row ends."""
        return _TOP + ROW * len(self.rows)

    def boxes(self) -> Iterator[tuple[tuple[str, str], float, float]]:
        """Yield the row and column of every box, and where it begins, from the left and the top."""
        for row, row_name in enumerate(self.rows):
            for column, column_name in enumerate(self.columns):
                place = LEFT + column * self.column_width, _TOP + row * ROW
                yield (row_name, column_name), *place

    def name_box(self, box: tuple[str, str]) -> str:
        """Return the row and the column of a box in words."""
        return f"{self.row_label} {box[0]}, {self.column_label} {box[1]}"

    def draw(self, slug: str, parts: Iterable[str], legend_height: float) -> str:
        """Return the picture with these parts; below the last row there is room for a legend."""
        lines = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} '
                f'{self.bottom + legend_height:g}" role="img" id="{slug}"'
                ' font-family="DejaVu Sans, sans-serif" font-size="11" fill="currentColor">'
            ),
            (
                f'<text x="{LEFT:g}" y="14" font-size="12.5" font-weight="bold">'
                f"{escape(self.title)}</text>"
            ),
            (
                f'<text x="{LEFT - 9:g}" y="43" text-anchor="end" opacity="0.75">'
                f"{escape(self.row_label)}</text>"
            ),
            f'<text x="{LEFT:g}" y="30" opacity="0.75">{escape(self.column_label)}</text>',
            *self._names(),
            *parts,
            "</svg>",
        ]
        return "\n".join(lines)

    def _names(self) -> Iterator[str]:
        for place, name in enumerate(self.columns):
            x = LEFT + (place + 0.5) * self.column_width
            yield f'<text x="{x:.1f}" y="46" text-anchor="middle">{escape(name)}</text>'
        for place, name in enumerate(self.rows):
            y = _TOP + (place + 0.5) * ROW + 4
            yield f'<text x="{LEFT - 9:g}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>'
