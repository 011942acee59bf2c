"""Sections of a training page: pipeline, where the time goes, memory, components."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.results.training_report import StageMemory, TrainingReport
from foretoken.domain.units import GIB
from foretoken.page.section import Cell, DataTable, Picture, Section
from foretoken.simulator.report.palette import (
    OF_MEMORY,
    OF_STREAM,
    color_of_group,
    label_of_group,
)
from foretoken.simulator.report.plots import draw_ranked, draw_stacked_rows
from foretoken.simulator.report.provenance import provenance_picture
from foretoken.simulator.report.span_plot import Window, draw_spans
from foretoken.simulator.report.training_plots import Staircase, draw_staircases
from foretoken.simulator.report.training_streams import (
    SpanArrays,
    chunk_places,
    measure_streams,
    pick_stages,
    span_arrays,
)

# More boxes than this make a picture nobody can read and a page nobody can load, in all and of the
# computation of one stage. A longer step is cut to windows of half as many.
_MAX_BOXES = 4000
_MAX_STAGE_BOXES = 120
_MAX_ROWS = 64
_MAX_BARS = 16
_MAX_CURVES = 8
_MAX_COLUMNS = 8


def pipeline(report: TrainingReport) -> Section:
    """Return the pictures of the pipeline: the whole step, or its beginning and its end."""
    spans = span_arrays(report.spans)
    stages = spans.stages[:_MAX_ROWS]
    caption = (
        "Numbers are micro batches; what a stage sends, reduces and gathers runs in the low row"
        " beneath its computation."
    )
    if chunk_places(spans).any():
        caption += " Lighter boxes are of a stage's second and later chunks of layers."
    caption += " Rest the pointer on a box for its times."
    if len(stages) < len(spans.stages):
        caption += f" Only the first {len(stages)} of {len(spans.stages)} stages are drawn."
    drawn = spans.pick(np.isin(spans.stage, stages))
    end = max(spans.end_of_all_ms, 1e-9)
    pictures = []
    for title, window in _windows(drawn, end):
        cut = ""
        if window.length_ms < end:
            cut = f" Drawn are {format_number(window.length_ms)} of {format_number(end)} ms; the"
            cut += " Chrome trace has all of them."
        svg = draw_spans(title, drawn, stages, window)
        pictures.append(Picture(svg=svg, caption=caption + cut))
        caption = ""
    return Section(
        title="Pipeline",
        intro=f"{report.num_micro_batches:,} micro batch{'es' * (report.num_micro_batches != 1)}"
        " per data-parallel replica.",
        pictures=pictures,
    )


def _windows(spans: SpanArrays, end: float) -> Sequence[tuple[str, Window]]:
    """Return what to draw: all of the step, or as much of both its ends as can be read."""
    if _can_be_read(spans, _MAX_BOXES, _MAX_STAGE_BOXES):
        return [("What each stage does", Window(start_ms=0.0, end_ms=end))]
    length = min(_readable_ms(spans.start_ms, spans), _readable_ms(end - spans.end_ms, spans))
    return [
        ("The beginning of the step", Window(start_ms=0.0, end_ms=length)),
        ("The end of the step", Window(start_ms=end - length, end_ms=end)),
    ]


def _can_be_read(spans: SpanArrays, most: int, most_of_stage: int) -> bool:
    computing = spans.stage[spans.is_compute]
    return len(spans.kind) <= most and int(np.bincount(computing).max(initial=0)) <= most_of_stage


def _readable_ms(distance_ms: NDArray[np.float64], spans: SpanArrays) -> float:
    """Return how far from an end of the step a picture can reach; spans have distances from it."""
    whole = np.sort(distance_ms)
    reach = float(whole[min(_MAX_BOXES // 2, len(whole) - 1)])
    for stage in spans.stages:
        own = np.sort(distance_ms[(spans.stage == stage) & spans.is_compute])
        if len(own) > _MAX_STAGE_BOXES // 2:
            reach = min(reach, float(own[_MAX_STAGE_BOXES // 2]))
    return reach


def time(report: TrainingReport) -> Section:
    """Return where the time goes: on the critical stage, on every stage, by axis, and certainty."""
    groups = {
        label_of_group(group): time_ms
        for group, time_ms in report.step_time_ms_by_group.items()
        if time_ms > 0
    }
    colors = {
        label_of_group(group): color_of_group(group) for group in report.step_time_ms_by_group
    }
    pictures = [
        Picture(
            svg=draw_ranked("time", "Critical stage, one step", "ms", groups, colors),
            caption=(
                "GEMM, attention and elementwise are forward and backward together; recompute is"
                " the second forward pass. Communication is what no computation hides; the bubble"
                " is waiting for other stages."
            ),
        )
    ]
    spans = span_arrays(report.spans)
    if len(spans.kind):
        pictures.append(_streams(spans))
    if any(report.communication_ms_by_axis.values()):
        pictures.append(_axes(report))
    shares = report.step_time_ratio_by_provenance
    if shares:
        pictures.append(provenance_picture("provenance", {"critical stage": shares}))
    return Section(title="Where the time goes", pictures=pictures)


def _streams(spans: SpanArrays) -> Picture:
    streams = measure_streams(spans)
    shown = pick_stages(list(streams), _MAX_BARS)
    rows = {f"stage {stage}": streams[stage] for stage in shown}
    cut = ""
    if len(shown) < len(streams):
        cut = f" Drawn are {len(shown)} of {len(streams)} stages."
    svg = draw_stacked_rows("streams", "Every stage, one step", "time (ms)", rows, OF_STREAM)
    caption = (
        "Passes contain the tensor-parallel communication that waits for nothing else. Exposed"
        " communication is transfers, reductions and gathers with no computation during them."
    )
    return Picture(svg=svg, caption=caption + cut)


def _axes(report: TrainingReport) -> Picture:
    rows = {}
    for axis, whole_ms in sorted(
        report.communication_ms_by_axis.items(), key=lambda item: -item[1]
    ):
        exposed = min(report.exposed_ms_by_axis.get(axis, 0.0), whole_ms)
        rows[axis] = {
            "exposed communication": exposed,
            "hidden communication": whole_ms - exposed,
        }
    return Picture(
        svg=draw_stacked_rows(
            "axes", "Communication of the critical stage", "time (ms)", rows, OF_STREAM
        ),
        caption=(
            "By the axis of parallelism that communicates. Hidden communication overlaps"
            " computation; by how much it slows that is the overlap slowdown."
        ),
    )


def memory(report: TrainingReport) -> Section:
    """Return the peak of every stage by what holds it, and the memory over the step."""
    parts = {stage.stage: parts_gib(stage) for stage in report.memory}
    device_gib = report.device_memory_bytes / GIB
    shown = pick_stages(list(parts), _MAX_BARS)
    rows = {f"stage {stage}": parts[stage] for stage in shown}
    limit = (device_gib, f"device: {format_number(device_gib)} GiB") if device_gib else None
    caption = (
        "At the moment each stage holds most. Activations are those of all micro batches it then"
        " has in flight; temporary is what lives within an operator, often the logits."
    )
    if len(shown) < len(parts):
        caption += f" Drawn are {len(shown)} of {len(parts)} stages; the table has all."
    title = "Peak memory of one device"
    pictures = [
        Picture(
            svg=draw_stacked_rows("memory", title, "GiB", rows, OF_MEMORY, limit=limit),
            caption=caption,
        )
    ]
    if len(report.memory_timeline.time_ms):
        pictures.append(_memory_over_time(report, limit))
    return Section(
        title="Memory",
        intro=(
            "Allocated is what tensors occupy; reserved is what the allocator takes from the device"
            " for it, with what the driver and communicators hold, and decides whether it fits."
        ),
        pictures=pictures,
        table=_peak_table(report.memory),
    )


def _memory_over_time(report: TrainingReport, limit: tuple[float, str] | None) -> Picture:
    columns = report.memory_timeline
    stage = np.asarray(columns.stage, dtype=np.int64)
    times = np.asarray(columns.time_ms, dtype=np.float64)
    held = np.asarray(columns.bytes, dtype=np.float64) / GIB
    all_stages = [int(number) for number in np.unique(stage)]
    fullest = int(stage[held.argmax()])
    shown = sorted({*pick_stages(all_stages, _MAX_CURVES - 1), fullest})
    curves = {
        f"stage {number}": Staircase(times=times[stage == number], values=held[stage == number])
        for number in shown
    }
    end = max(report.step_time_ms, float(times.max()))
    caption = "What tensors occupy on one device of a stage, from the step's start to its end."
    if len(shown) < len(all_stages):
        caption += f" Drawn are {len(shown)} of {len(all_stages)} stages, with the fullest."
    labels = ("Allocated memory over the step", "time (ms)", "GiB")
    svg = draw_staircases("memory-timeline", labels, curves, end, limit)
    return Picture(svg=svg, caption=caption)


def _peak_table(stages: Sequence[StageMemory]) -> DataTable:
    rows = []
    for stage in stages:
        margin = _gib(stage.margin_bytes)
        rows.append(
            [
                str(stage.stage),
                _gib(stage.total_bytes),
                _gib(stage.reserved_bytes),
                Cell(text=f"{margin}, too little", tone="alert")
                if stage.margin_bytes < 0
                else margin,
                format_number(stage.peak_ms),
                format_number(stage.num_in_flight),
                stage.largest,
            ]
        )
    headers = [*("stage", "allocated (GiB)", "reserved (GiB)", "margin (GiB)", "peak at (ms)")]
    headers += ["in flight", "largest part"]
    return DataTable(headers=headers, rows=rows, text_columns=(len(headers) - 1,))


def memory_parts(stages: Sequence[StageMemory]) -> Section:
    """Return what holds the memory of every stage at its peak."""
    rows = [
        [str(stage.stage), *(_gib(getattr(stage, f"{name}_bytes")) for name in OF_MEMORY)]
        for stage in stages
    ]
    return Section(
        title="Memory by part",
        intro="Of one device of every stage at its peak, in GiB. The parts add up to the allocated"
        " memory.",
        table=DataTable(headers=("stage", *OF_MEMORY), rows=rows),
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def parts_gib(stage: StageMemory) -> Mapping[str, float]:
    """Return what occupies a device of a stage at its peak, in GiB by part."""
    return {name: getattr(stage, f"{name}_bytes") / GIB for name in OF_MEMORY}


def components(report: TrainingReport) -> Section:
    """Return the parts of a step that measured steps are compared by, a column per stage."""
    stages = sorted({item.stage for item in report.components})
    shown = pick_stages(stages, _MAX_COLUMNS)
    times = {(item.name, item.stage): item for item in report.components}
    names = list(dict.fromkeys(item.name for item in report.components))
    rows = []
    for name in names:
        calls = {times[name, stage].num_calls for stage in stages if (name, stage) in times}
        span = f"{min(calls)} to {max(calls)}" if len(calls) > 1 else str(*calls)
        cells = [
            format_number(times[name, stage].time_ms) if (name, stage) in times else "-"
            for stage in shown
        ]
        rows.append([name, span, *cells])
    cut = f" Shown are {len(shown)} of {len(stages)} stages." if len(shown) < len(stages) else ""
    return Section(
        title="Components",
        intro=(
            "Mean times in ms of one occurrence, as profiles of training runs tell them; `foretoken"
            " validate training` compares them with measured ones. An encoder is one layer of one"
            " micro batch, a stage one micro batch." + cut
        ),
        table=DataTable(
            headers=["component", "per step", *(f"stage {stage} (ms)" for stage in shown)],
            rows=rows,
        ),
    )
