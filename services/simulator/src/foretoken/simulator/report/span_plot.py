"""Draw what the stages of a pipeline do when, as one SVG text that shows details on hovering."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.results.training_report import SPAN_KINDS
from foretoken.simulator.report.palette import OF_SPAN, lighten, text_color_on
from foretoken.simulator.report.training_streams import (
    SpanArrays,
    assign_lanes,
    chunk_places,
    kind_label,
)

# In units of the picture, which a page scales to its width.
_WIDTH = 1000.0
_LEFT = 62.0
_RIGHT = 22.0
_TOP = 26.0
_AXIS = 40.0
_LEGEND = 22.0
_LEGEND_COLUMN = 150.0
_COMMUNICATION_SHARE = 0.38
# Rows get lower the more there are.
_ROW_HEIGHTS = ((8, 30.0), (16, 22.0), (32, 16.0))
_LOWEST_ROW = 12.0
_DIGIT_WIDTH = 6.0
_MIN_TEXT_HEIGHT = 9.0
_MIN_BOX_WIDTH = 0.4
_NUM_TICKS = 8
# By how much the second, third, ... chunk of a stage is drawn lighter.
_SHADES = (0.0, 0.38, 0.6, 0.75)


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The part of a step that a picture shows, in ms."""

    start_ms: float
    end_ms: float

    @property
    def length_ms(self) -> float:
        """How long it is."""
        return max(self.end_ms - self.start_ms, 1e-12)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Where the rows of the stages are; communication is a low row beneath computation."""

    stages: Sequence[int]
    height: float
    has_communication: bool
    window: Window

    @property
    def pitch(self) -> float:
        low = _COMMUNICATION_SHARE * self.height if self.has_communication else 0.0
        return self.height + low + 4.0

    @property
    def bottom(self) -> float:
        return _TOP + self.pitch * len(self.stages)

    def x_of(self, time_ms: float) -> float:
        share = (time_ms - self.window.start_ms) / self.window.length_ms
        return _LEFT + min(max(share, 0.0), 1.0) * (_WIDTH - _LEFT - _RIGHT)


def draw_spans(title: str, spans: SpanArrays, stages: Sequence[int], window: Window) -> str:
    """Draw the spans of some stages that lie in a window, a row per stage.

    Colour is the kind, lighter the second and later chunks of a stage; the number in a box is its
    micro batch.
    """
    is_drawn = (
        np.isin(spans.stage, stages)
        & (spans.end_ms > window.start_ms)
        & (spans.start_ms < window.end_ms)
    )
    places: list[int] = chunk_places(spans)[is_drawn].tolist()
    lanes = [lane for lane, is_here in zip(assign_lanes(spans), is_drawn, strict=True) if is_here]
    drawn = spans.pick(is_drawn)
    rows = _Rows(
        stages=stages,
        height=next((height for most, height in _ROW_HEIGHTS if len(stages) <= most), _LOWEST_ROW),
        has_communication=bool((~drawn.is_compute).any()),
        window=window,
    )
    kinds = np.unique(drawn.kind).tolist()
    per_line = int((_WIDTH - _LEFT) // _LEGEND_COLUMN)
    num_lines = -(-(len(kinds) + 1) // per_line)
    height = rows.bottom + _AXIS + _LEGEND * num_lines
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}"'
            ' role="img" font-family="DejaVu Sans, sans-serif" font-size="10.5"'
            ' fill="currentColor">'
        ),
        f'<text x="{_LEFT:g}" y="14" font-size="12" font-weight="bold">{title}</text>',
        *_background(rows),
        *_axis(rows),
        *_boxes(drawn, places, lanes, rows),
        *_legend(kinds, rows.bottom + _AXIS, per_line),
        "</svg>",
    ]
    return "\n".join(parts)


def _background(rows: _Rows) -> Iterator[str]:
    width = _WIDTH - _LEFT - _RIGHT
    for row, stage in enumerate(rows.stages):
        top = _TOP + row * rows.pitch
        yield (
            f'<rect x="{_LEFT:g}" y="{top:.1f}" width="{width:g}" height="{rows.pitch - 3:.1f}"'
            ' opacity="0.07"/>'
        )
        yield (
            f'<text x="{_LEFT - 6:g}" y="{top + rows.height / 2 + 3.5:.1f}" text-anchor="end"'
            f' font-size="{min(10.5, rows.height - 2):g}">stage {stage}</text>'
        )


def _axis(rows: _Rows) -> Iterator[str]:
    for tick in _ticks(rows.window):
        x = rows.x_of(tick)
        yield (
            f'<line x1="{x:.1f}" y1="{_TOP:g}" x2="{x:.1f}" y2="{rows.bottom + 3:.1f}"'
            ' stroke="currentColor" stroke-opacity="0.16" stroke-width="0.7"/>'
        )
        yield (
            f'<text x="{x:.1f}" y="{rows.bottom + 15:.1f}" text-anchor="middle">'
            f"{format_number(tick)}</text>"
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield (f'<text x="{middle:g}" y="{rows.bottom + 30:.1f}" text-anchor="middle">time (ms)</text>')


def _ticks(window: Window) -> Sequence[float]:
    """Return round times in the window, about eight of them."""
    raw = window.length_ms / _NUM_TICKS
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    first, last = np.ceil(window.start_ms / step), np.floor(window.end_ms / step + 1e-9)
    return [float(number * step) for number in np.arange(first, last + 1)]


def _boxes(
    spans: SpanArrays, places: Sequence[int], lanes: Sequence[int], rows: _Rows
) -> Iterator[str]:
    row_of = {stage: row for row, stage in enumerate(rows.stages)}
    columns = (spans.stage, spans.chunk, spans.micro_batch, spans.kind, spans.start_ms)
    has_chunks = max(places, default=0) > 0
    shared = _shared(spans, lanes)
    for stage, chunk, micro_batch, kind, start, end, place, lane, is_shared, is_compute in zip(
        *(column.tolist() for column in columns),
        spans.end_ms.tolist(),
        places,
        lanes,
        shared,
        spans.is_compute.tolist(),
        strict=True,
    ):
        top = _TOP + row_of[stage] * rows.pitch + (0.0 if is_compute else rows.height + 1.0)
        height = rows.height if is_compute else _COMMUNICATION_SHARE * rows.height
        if is_shared:
            # Half the row each, so that all that runs at the same time is seen.
            top, height = top + (height / 2 if lane else 0.0), height / 2
        left = rows.x_of(start)
        width = max(rows.x_of(end) - left, _MIN_BOX_WIDTH)
        color = lighten(OF_SPAN[SPAN_KINDS[kind]], _SHADES[min(int(place), len(_SHADES) - 1)])
        words = [f"stage {stage}", kind_label(kind)]
        if micro_batch >= 0:
            words += [f"micro batch {micro_batch}", *([f"chunk {chunk}"] * has_chunks)]
        words.append(f"{_ms(start)} to {_ms(end)} ms ({format_number(end - start)} ms)")
        yield (
            f'<rect x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{height:.1f}"'
            f' fill="{color}"{_edge(width)}><title>{", ".join(words)}</title></rect>'
        )
        text = str(micro_batch)
        has_room = height >= _MIN_TEXT_HEIGHT and width > _DIGIT_WIDTH * len(text) + 3
        if micro_batch >= 0 and is_compute and has_room:
            yield (
                f'<text x="{left + width / 2:.1f}" y="{top + height / 2 + 3.2:.1f}"'
                f' font-size="9" text-anchor="middle" pointer-events="none"'
                f' fill="{text_color_on(color)}">{text}</text>'
            )


def _shared(spans: SpanArrays, lanes: Sequence[int]) -> Sequence[bool]:
    """Return whether each span overlaps another one of its stream, or began during it."""
    second = np.asarray(lanes) > 0
    shared = second.copy()
    for index in np.flatnonzero(second).tolist():
        shared |= (
            (spans.stage == spans.stage[index])
            & (spans.is_compute == spans.is_compute[index])
            & (spans.start_ms <= spans.start_ms[index])
            & (spans.end_ms > spans.start_ms[index])
        )
    return [bool(value) for value in shared]


def _edge(width: float) -> str:
    """Return the outline of a box, where it does not hide the box."""
    return ' stroke="#fff" stroke-width="0.5"' if width > 2 else ""  # noqa: PLR2004


def _ms(time_ms: float) -> str:
    return f"{time_ms:,.3f}".rstrip("0").rstrip(".")


def _legend(kinds: Sequence[int], top: float, per_line: int) -> Iterator[str]:
    entries: Mapping[str, str] = {kind_label(kind): OF_SPAN[SPAN_KINDS[kind]] for kind in kinds}
    for place, (label, color) in enumerate([*entries.items(), ("waiting", "")]):
        x = _LEFT + (place % per_line) * _LEGEND_COLUMN
        y = top + (place // per_line) * _LEGEND
        fill = f'fill="{color}"' if color else 'opacity="0.14"'
        yield f'<rect x="{x:g}" y="{y:.1f}" width="14" height="10" {fill}/>'
        yield f'<text x="{x + 19:g}" y="{y + 9:.1f}">{label}</text>'
