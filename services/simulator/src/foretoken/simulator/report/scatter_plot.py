"""Draw points in a plane, as one SVG text that shows a point's details where it is pointed at.

No script: the details of every point are in the picture, and its style shows those of one. Every
function takes plain numbers with their labels and units; none knows what they mean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Literal

from foretoken.domain.metrics.number_text import format_number

# In units of the picture, which a page scales to its width.
_WIDTH = 1000.0
_LEFT = 76.0
_RIGHT = 24.0
_TOP = 30.0
_HEIGHT = 400.0
_AXIS = 48.0
_LEGEND = 22.0
_DETAIL_LINE = 16.0
_LETTER_WIDTH = 6.4
_NUM_TICKS = 7
_MARGIN_RATIO = 1.06
_LOG_MARGIN_RATIO = 1.25
# Room below the lowest value on an axis that begins near it, of all that the values span; and the
# least share of the highest that such an axis spans, or its numbers would look alike.
_NEAR_MARGIN, _LEAST_SPAN = 0.06, 0.1
# A logarithmic axis pays once the values span this ratio.
_LOG_RATIO = 10.0
# Width of a letter, and room between labels, above and below them.
_LABEL_LETTER, _LABEL_HEIGHT = 7.5, 13.0
# Radius of a mark and what else is said of its look.
_LOOKS = {
    "faint": (2.6, 'fill-opacity="0.4"'),
    "plain": (3.2, 'fill-opacity="0.75"'),
    "strong": (6.0, 'stroke="#fff" stroke-width="0.9"'),
}
_WEIGHTS = tuple(_LOOKS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A point with what is said of it; `x_range` and `y_range` are its bounds, if it has any.

    A `label` is written next to it. Those of little weight are smaller and stand behind.
    """

    x: float
    y: float
    details: Sequence[str]
    color: str
    label: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    weight: Literal["strong", "plain", "faint"] = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    """Points, a line through some (`front`), and a value of x that must not be passed (`limit`).

    `legend` gives what colours stand for; `hint` stands where details will. `may_be_log` lets y be
    logarithmic if it spans much. With `is_near` the axes begin near the points and not at zero.
    Each of `lines` is a colour and the points that a further line goes through.
    """

    title: str
    x_label: str
    y_label: str
    marks: Sequence[Mark]
    legend: Sequence[tuple[str, str]] = ()
    front: Sequence[tuple[float, float]] = ()
    front_name: str = "Pareto front"
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]] = ()
    limit: tuple[float, str] | None = None
    may_be_log: bool = False
    is_near: bool = False
    hint: str = "Point at a mark, or tap it, for its details and its interval."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Where a value is on an axis from 0 or, where it spans much, on a logarithmic one."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def place(self, value: float) -> float:
        """Return the place of a value; those outside are at the edge."""
        if self.is_log:
            share = (log10(max(value, self.low)) - log10(self.low)) / (
                log10(self.high) - log10(self.low)
            )
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def ticks(self) -> Sequence[float]:
        """Return round values, about seven of them."""
        if self.is_log:
            decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            values = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
            return [value for value in values if self.low <= value <= self.high]
        step = round_step((self.high - self.low) / _NUM_TICKS)
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """The axes."""

    x: _Scale
    y: _Scale
    taken: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def bottom(self) -> float:
        return _TOP + _HEIGHT


def draw_scatter(slug: str, plot: Scatter) -> str:
    """Draw the points; the picture says so where there are none."""
    marks = [mark for mark in plot.marks if isfinite(mark.x) and isfinite(mark.y)]
    ordered = sorted(marks, key=lambda mark: _WEIGHTS.index(mark.weight))
    limits = [plot.limit[0]] if plot.limit else []
    frame = _Frame(
        x=_scale([mark.x for mark in marks] + limits, _LEFT, _WIDTH - _RIGHT),
        y=_scale([mark.y for mark in marks], _TOP + _HEIGHT, _TOP, may_be_log=plot.may_be_log),
    )
    if plot.is_near:
        frame = replace(
            frame,
            x=_come_near(frame.x, [mark.x for mark in marks] + limits),
            y=_come_near(frame.y, [mark.y for mark in marks]),
        )
    num_lines = max((len(mark.details) for mark in marks), default=1)
    details_top = frame.bottom + _AXIS + _LEGEND
    height = details_top + num_lines * _DETAIL_LINE + 8
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}"'
            f' role="img" id="{slug}" font-family="DejaVu Sans, sans-serif" font-size="11"'
            ' fill="currentColor">'
        ),
        _style(slug),
        (
            f'<text x="{_LEFT:g}" y="14" font-size="12.5" font-weight="bold">'
            f"{escape(plot.title)}</text>"
        ),
        *_axes(frame, plot),
        *_limit(frame, plot),
        *_front(frame, plot),
        *_lines(frame, plot),
        *_legend(frame, plot),
        (
            f'<text class="hint" x="{_LEFT:g}" y="{details_top + 11:.1f}" opacity="0.65">'
            f"{escape(plot.hint)}</text>"
        ),
        *(text for mark in ordered for text in _mark(frame, mark, details_top)),
        "</svg>",
    ]
    return "\n".join(parts)


def round_step(least: float) -> float:
    """Return the next 1, 2, 2.5, 5 or 10 times a power of ten."""
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least - 1e-12)


def _style(slug: str) -> str:
    """Return the rules that show one point's details and hide the hint meanwhile."""
    own = f"#{slug}"
    return (
        f"<style>{own} .more{{visibility:hidden;pointer-events:none}}"
        f"{own} .mark{{cursor:pointer;outline:none}}"
        f"{own} .mark:hover .more,{own} .mark:focus .more{{visibility:visible}}"
        f"{own}:has(.mark:hover) .hint,{own}:has(.mark:focus) .hint{{visibility:hidden}}"
        f"{own}:has(.mark:hover) .mark:focus:not(:hover) .more{{visibility:hidden}}"
        f"{own} .paper{{fill:var(--paper,#fff)}}</style>"
    )


def _scale(
    values: Sequence[float], start: float, end: float, *, may_be_log: bool = False
) -> _Scale:
    positive = [value for value in values if value > 0]
    highest = max(positive, default=1.0) * _MARGIN_RATIO
    lowest = min(positive, default=highest)
    if may_be_log and highest > _LOG_RATIO * lowest and len(positive) == len(values):
        low, high = lowest / _LOG_MARGIN_RATIO, highest * _LOG_MARGIN_RATIO
        return _Scale(low=low, high=high, start=start, end=end, is_log=True)
    return _Scale(low=0.0, high=highest, start=start, end=end, is_log=False)


def _come_near(scale: _Scale, values: Sequence[float]) -> _Scale:
    """Return a linear scale that begins a little below the values."""
    if scale.is_log or not values:
        return scale
    lowest, highest = min(values), max(values)
    low = min(lowest - _NEAR_MARGIN * (highest - lowest), (1 - _LEAST_SPAN) * highest)
    return replace(scale, low=max(low, 0.0))


def _axes(frame: _Frame, plot: Scatter) -> Iterator[str]:
    faint = 'stroke="currentColor" stroke-opacity="0.14" stroke-width="0.7"'
    for tick in frame.x.ticks():
        x = frame.x.place(tick)
        yield f'<line x1="{x:.1f}" y1="{_TOP:g}" x2="{x:.1f}" y2="{frame.bottom:g}" {faint}/>'
        yield (
            f'<text x="{x:.1f}" y="{frame.bottom + 16:g}" text-anchor="middle">'
            f"{format_number(tick)}</text>"
        )
    for tick in frame.y.ticks():
        y = frame.y.place(tick)
        yield f'<line x1="{_LEFT:g}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT:g}" y2="{y:.1f}" {faint}/>'
        yield (
            f'<text x="{_LEFT - 7:g}" y="{y + 3.8:.1f}" text-anchor="end">'
            f"{format_number(tick)}</text>"
        )
    yield (
        f'<path d="M{_LEFT:g} {_TOP:g}V{frame.bottom:g}H{_WIDTH - _RIGHT:g}" fill="none"'
        ' stroke="currentColor" stroke-width="0.8"/>'
    )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield (
        f'<text x="{middle:g}" y="{frame.bottom + 35:g}" text-anchor="middle" font-size="11.5">'
        f"{escape(plot.x_label)}</text>"
    )
    centre = _TOP + _HEIGHT / 2
    yield (
        f'<text transform="translate(14 {centre:g}) rotate(-90)" text-anchor="middle"'
        f' font-size="11.5">{escape(plot.y_label)}</text>'
    )


def _limit(frame: _Frame, plot: Scatter) -> Iterator[str]:
    if plot.limit is None:
        return
    value, name = plot.limit
    x = frame.x.place(value)
    is_right = x > (_LEFT + _WIDTH) / 2
    yield (
        f'<line x1="{x:.1f}" y1="{_TOP:g}" x2="{x:.1f}" y2="{frame.bottom:g}"'
        ' stroke="currentColor" stroke-width="1.1" stroke-dasharray="5 4"/>'
    )
    yield (
        f'<text x="{x + (-5 if is_right else 5):.1f}" y="{_TOP + 11:g}"'
        f' text-anchor="{"end" if is_right else "start"}">{escape(name)}</text>'
    )


def _front(frame: _Frame, plot: Scatter) -> Iterator[str]:
    if not plot.front:
        return
    points = " ".join(
        f"{frame.x.place(x):.1f},{frame.y.place(y):.1f}" for x, y in sorted(plot.front)
    )
    yield (
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.6"'
        ' stroke-opacity="0.75"/>'
    )


def _lines(frame: _Frame, plot: Scatter) -> Iterator[str]:
    for color, line in plot.lines:
        points = " ".join(f"{frame.x.place(x):.1f},{frame.y.place(y):.1f}" for x, y in sorted(line))
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>'


def _legend(frame: _Frame, plot: Scatter) -> Iterator[str]:
    x = _LEFT
    y = frame.bottom + _AXIS + 4
    for name, color in plot.legend:
        yield f'<circle cx="{x + 5:.1f}" cy="{y - 4:.1f}" r="5" fill="{color}"/>'
        yield f'<text x="{x + 15:.1f}" y="{y:.1f}">{escape(name)}</text>'
        x += 15 + _LETTER_WIDTH * len(name) + 24
    if plot.front:
        yield (
            f'<line x1="{x:.1f}" y1="{y - 4:.1f}" x2="{x + 18:.1f}" y2="{y - 4:.1f}"'
            ' stroke="currentColor" stroke-width="1.6" stroke-opacity="0.75"/>'
        )
        yield f'<text x="{x + 24:.1f}" y="{y:.1f}">{escape(plot.front_name)}</text>'


def _mark(frame: _Frame, mark: Mark, details_top: float) -> Iterator[str]:
    x, y = frame.x.place(mark.x), frame.y.place(mark.y)
    radius, look = _LOOKS[mark.weight]
    name = escape(mark.details[0] if mark.details else "")
    yield f'<g class="mark" tabindex="0" role="listitem" aria-label="{name}">'
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{mark.color}" {look}/>'
    if mark.label and _has_room(frame, x, y, len(mark.label)):
        yield (
            f'<text x="{x + 8:.1f}" y="{y - 6:.1f}" font-size="11" font-weight="bold">'
            f"{escape(mark.label)}</text>"
        )
    yield '<g class="more">'
    yield from _intervals(frame, mark)
    yield (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius + 3:g}" fill="none"'
        ' stroke="currentColor" stroke-width="1.6"/>'
    )
    for line, text in enumerate(mark.details):
        weight = ' font-weight="bold"' if line == 0 else ""
        yield (
            f'<text x="{_LEFT:g}" y="{details_top + 11 + line * _DETAIL_LINE:.1f}"{weight}>'
            f"{escape(text)}</text>"
        )
    yield "</g></g>"


def _has_room(frame: _Frame, x: float, y: float, num_letters: int) -> bool:
    """Return whether a label next to a point covers no earlier one, and take the room if so."""
    right = x + _LABEL_LETTER * num_letters
    for left, end, top in frame.taken:
        if left < right and x < end and abs(y - top) < _LABEL_HEIGHT:
            return False
    frame.taken.append((x, right, y))
    return True


def _intervals(frame: _Frame, mark: Mark) -> Iterator[str]:
    x, y = frame.x.place(mark.x), frame.y.place(mark.y)
    bar = 'fill="none" stroke="currentColor" stroke-width="1.4"'
    if mark.y_range is not None:
        low, high = (frame.y.place(value) for value in mark.y_range)
        yield (
            f'<path d="M{x - 5:.1f} {low:.1f}H{x + 5:.1f}M{x:.1f} {low:.1f}V{high:.1f}'
            f'M{x - 5:.1f} {high:.1f}H{x + 5:.1f}" {bar}/>'
        )
    if mark.x_range is not None:
        low, high = (frame.x.place(value) for value in mark.x_range)
        yield (
            f'<path d="M{low:.1f} {y - 5:.1f}V{y + 5:.1f}M{low:.1f} {y:.1f}H{high:.1f}'
            f'M{high:.1f} {y - 5:.1f}V{y + 5:.1f}" {bar}/>'
        )
