"""The pictures of several training steps side by side."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from foretoken.domain.metrics.metric import largest_first
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.results.training_report import StageMemory, TrainingReport
from foretoken.domain.units import GIB
from foretoken.page.figure import SERIES, plain_text
from foretoken.page.section import Picture, Section
from foretoken.simulator.report.interval_plot import Interval, draw_intervals
from foretoken.simulator.report.palette import (
    OF_MEMORY,
    OF_STREAM,
    color_of_group,
    label_of_group,
)
from foretoken.simulator.report.plots import draw_stacked_rows
from foretoken.simulator.report.span_plot import Window, draw_spans
from foretoken.simulator.report.training_detail import parts_gib
from foretoken.simulator.report.training_streams import (
    SpanArrays,
    measure_streams,
    pick_stages,
    span_arrays,
)

Reports = Mapping[str, TrainingReport]

_MAX_BARS = 8
# More boxes than this in a row are a blur.
_MAX_BOXES = 240


def training_pictures(reports: Reports) -> list[Section]:
    """Return where the time goes, what stages hold and what they do, of every labelled step."""
    timed = {label: report for label, report in reports.items() if report.step_time_ms > 0}
    sections = []
    if timed:
        sections.append(Section(title="Where the time goes", pictures=list(_time(timed))))
    if any(report.memory for report in reports.values()):
        sections.append(Section(title="Memory", pictures=[_memory(reports)]))
    drawn = {label: report for label, report in timed.items() if len(report.spans.kind)}
    if drawn:
        sections.append(_pipeline(drawn))
    return sections


def _time(reports: Reports) -> Iterator[Picture]:
    intervals = [
        Interval(
            label=label,
            low=report.step_time_low_ms,
            value=report.step_time_ms,
            high=report.step_time_high_ms,
            color=color,
        )
        for (label, report), color in zip(reports.items(), SERIES, strict=False)
    ]
    yield Picture(
        svg=draw_intervals("compare-steps", "Step time with its interval", "ms", intervals),
        caption="A bar is the step with every operator at its lower, and at its upper, 90 % bound.",
    )
    groups = largest_first(report.step_time_ms_by_group for report in reports.values())
    rows = {
        plain_text(label): {
            label_of_group(group): time_ms
            for group, time_ms in report.step_time_ms_by_group.items()
        }
        for label, report in reports.items()
    }
    colors = {label_of_group(group): color_of_group(group) for group in groups}
    yield Picture(
        svg=draw_stacked_rows(
            "compare-groups", "Critical stage, one step", "time (ms)", rows, colors
        ),
        caption=(
            "GEMM, attention and elementwise are forward and backward together; recompute is the"
            " second forward pass. Communication is what no computation hides; the bubble is"
            " waiting for other stages."
        ),
    )
    if any(any(report.communication_ms_by_axis.values()) for report in reports.values()):
        yield _communication(reports)


def _communication(reports: Reports) -> Picture:
    axes = largest_first(report.communication_ms_by_axis for report in reports.values())
    rows = {}
    for axis in axes:
        for label, report in reports.items():
            whole_ms = report.communication_ms_by_axis.get(axis, 0.0)
            exposed_ms = min(report.exposed_ms_by_axis.get(axis, 0.0), whole_ms)
            rows[plain_text(f"{axis}, {label}")] = {
                "exposed communication": exposed_ms,
                "hidden communication": whole_ms - exposed_ms,
            }
    return Picture(
        svg=draw_stacked_rows(
            "compare-axes", "Communication of the critical stage", "time (ms)", rows, OF_STREAM
        ),
        caption=(
            "By the axis of parallelism that communicates. Hidden communication overlaps"
            " computation."
        ),
    )


def _memory(reports: Reports) -> Picture:
    rows, is_cut = {}, False
    for label, report in reports.items():
        shown = _shown_stages(report.memory)
        is_cut |= len(shown) < len(report.memory)
        for stage in shown:
            rows[plain_text(f"{label}, stage {stage.stage}")] = parts_gib(stage)
    sizes = {report.device_memory_bytes / GIB for report in reports.values()}
    size = sizes.pop() if len(sizes) == 1 else 0.0
    limit = (size, f"device: {format_number(size)} GiB") if size else None
    caption = "At the moment each stage holds most, one device of it; what tensors occupy."
    if is_cut:
        caption += f" Drawn are at most {_MAX_BARS} stages of each, with the fullest."
    return Picture(
        svg=draw_stacked_rows(
            "compare-memory", "Peak memory of one device", "GiB", rows, OF_MEMORY, limit=limit
        ),
        caption=caption,
    )


def _shown_stages(stages: Sequence[StageMemory]) -> Sequence[StageMemory]:
    if len(stages) <= _MAX_BARS:
        return stages
    fullest = min(stages, key=lambda stage: stage.margin_bytes).stage
    numbers = pick_stages([stage.stage for stage in stages], _MAX_BARS - 1)
    return [stage for stage in stages if stage.stage in {*numbers, fullest}]


def _pipeline(reports: Reports) -> Section:
    """Return what the critical stage of every step does, all on one scale of time."""
    picked = {label: _critical(report) for label, report in reports.items()}
    end = max(spans.end_of_all_ms for spans in picked.values())
    window = Window(start_ms=0.0, end_ms=min(end, *map(_readable_ms, picked.values())))
    pictures = []
    for label, spans in picked.items():
        (stage,) = spans.stages
        pictures.append(Picture(svg=draw_spans(escape(label), spans, [stage], window), caption=""))
    cut = ""
    if window.length_ms < end:
        cut = (
            f" Drawn are the first {format_number(window.length_ms)} of {format_number(end)} ms;"
            " the step's own page has the rest."
        )
    return Section(
        title="What the critical stage does",
        intro=(
            "The stage that waits least, of every run on the same scale of time. Numbers are micro"
            " batches; what the stage sends, reduces and gathers runs in the low row beneath its"
            f" computation.{cut}"
        ),
        pictures=pictures,
    )


def _critical(report: TrainingReport) -> SpanArrays:
    """Return the spans of the stage that waits least."""
    spans = span_arrays(report.spans)
    streams = measure_streams(spans)
    stage = min(streams, key=lambda number: streams[number]["waiting"])
    return spans.pick(spans.stage == stage)


def _readable_ms(spans: SpanArrays) -> float:
    """Return how far from its start a step can be drawn."""
    if len(spans.kind) <= _MAX_BOXES:
        return float("inf")
    return float(np.sort(spans.end_ms)[_MAX_BOXES])
