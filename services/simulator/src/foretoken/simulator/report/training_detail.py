"""Sections of a training page: pipeline, where the time goes, memory, components."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.results.training_report import StageMemory, TrainingReport
from foretoken.domain.units import GIB
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import Plot, Rule
from foretoken.page.curve import Curve, draw_counts, draw_curves, draw_parts
from foretoken.page.section import Cell, DataTable, Section
from foretoken.simulator.report.palette import (
    OF_MEMORY,
    OF_STREAM,
    color_of_group,
    label_of_group,
)
from foretoken.simulator.report.provenance import provenance_chart
from foretoken.simulator.report.training_streams import (
    SpanArrays,
    kind_label,
    measure_streams,
    pick_stages,
    span_arrays,
)

# More spans than this make a page slow to open.
_MAX_SPANS = 6000
# A curve with more points than this has lost nothing that can be seen.
_MAX_POINTS = 600
_MAX_BARS = 16
_MAX_CURVES = 8
_MAX_COLUMNS = 8


def pipeline(report: TrainingReport) -> Section:
    """Return what the stages do when, which can be zoomed; of a long step its beginning."""
    spans = span_arrays(report.spans)
    caption = (
        "Communication of a stage that runs besides computation has a row of its own. Point at a"
        " span for its micro batch and times; shift and the wheel zoom."
    )
    if len(spans.kind) > _MAX_SPANS:
        caption += (
            f" Drawn are the first {_MAX_SPANS:,} of {len(spans.kind):,} spans; the Chrome trace"
            " has all."
        )
    first = np.sort(np.argsort(spans.start_ms, kind="stable")[:_MAX_SPANS])
    drawn = spans.pick(np.isin(np.arange(len(spans.kind)), first))
    num = report.num_micro_batches
    return Section(
        title="Pipeline",
        intro=f"{num:,} micro batch{'es' * (num != 1)} per data-parallel replica.",
        pictures=[span_chart("What each stage does", {"": drawn}, caption)],
    )


def span_chart(title: str, spans: Mapping[str, SpanArrays], caption: str) -> Chart:
    """Return the spans of stages as a Gantt chart, of one step or of several by name."""
    columns = [
        Column.words("stage", "row"),
        Column(title="time (ms)", name="start_ms"),
        Column(title="until (ms)", name="end_ms"),
        Column.words("kind"),
        Column(title="micro batch"),
        Column(title="chunk"),
    ]
    rows = []
    for label, found in spans.items():
        order = np.lexsort((found.start_ms, ~found.is_compute, found.stage))
        for place in order.tolist():
            stream = "" if found.is_compute[place] else ", communication"
            row = f"{label}{', ' if label else ''}stage {found.stage[place]}{stream}"
            batch = int(found.micro_batch[place])
            rows.append(
                (
                    row,
                    float(found.start_ms[place]),
                    float(found.end_ms[place]),
                    kind_label(int(found.kind[place])),
                    batch if batch >= 0 else None,
                    int(found.chunk[place]),
                )
            )
    plot = Plot(
        title=title,
        table=Table(columns=columns, rows=rows),
        x="start_ms",
        y="row",
        by="kind",
        colors=OF_STREAM,
        caption=caption,
    )
    return plot.spans("end_ms")


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
    caption = (
        "GEMM, attention and elementwise are forward and backward together; recompute is the second"
        " forward pass. Communication is what no computation hides; the bubble is waiting for other"
        " stages."
    )
    plot = Plot(title="Critical stage, one step", caption=caption, colors=colors)
    ranked = dict(sorted(groups.items(), key=lambda item: -item[1]))
    pictures = [draw_counts(plot, ranked, Column(title="time (ms)"))]
    spans = span_arrays(report.spans)
    if len(spans.kind):
        pictures.append(_streams(spans))
    if any(report.communication_ms_by_axis.values()):
        pictures.append(_axes(report))
    shares = report.step_time_ratio_by_provenance
    if shares:
        pictures.append(provenance_chart({"critical stage": shares}))
    return Section(title="Where the time goes", pictures=pictures)


def _streams(spans: SpanArrays) -> Chart:
    streams = measure_streams(spans)
    shown = pick_stages(list(streams), _MAX_BARS)
    rows = {f"stage {stage}": streams[stage] for stage in shown}
    cut = ""
    if len(shown) < len(streams):
        cut = f" Drawn are {len(shown)} of {len(streams)} stages."
    caption = (
        "Passes contain the tensor-parallel communication that waits for nothing else. Exposed"
        " communication is transfers, reductions and gathers with no computation during them."
    )
    plot = Plot(title="Every stage, one step", caption=caption + cut, colors=OF_STREAM)
    return draw_parts(plot, rows, Column(title="time (ms)"))


def _axes(report: TrainingReport) -> Chart:
    rows = {}
    for axis, whole_ms in sorted(
        report.communication_ms_by_axis.items(), key=lambda item: -item[1]
    ):
        exposed = min(report.exposed_ms_by_axis.get(axis, 0.0), whole_ms)
        rows[axis] = {
            "exposed communication": exposed,
            "hidden communication": whole_ms - exposed,
        }
    caption = (
        "By the axis of parallelism that communicates. Hidden communication overlaps computation;"
        " by how much it slows that is the overlap slowdown."
    )
    title = "Communication of the critical stage"
    plot = Plot(title=title, caption=caption, colors=OF_STREAM)
    return draw_parts(plot, rows, Column(title="time (ms)"))


def memory(report: TrainingReport) -> Section:
    """Return the peak of every stage by what holds it, and the memory over the step."""
    parts = {stage.stage: parts_gib(stage) for stage in report.memory}
    device_gib = report.device_memory_bytes / GIB
    shown = pick_stages(list(parts), _MAX_BARS)
    rows = {f"stage {stage}": parts[stage] for stage in shown}
    name = f"device: {format_number(device_gib)} GiB"
    rules = [Rule("x", device_gib, name)] if device_gib else []
    caption = (
        "At the moment each stage holds most. Activations are those of all micro batches it then"
        " has in flight; temporary is what lives within an operator, often the logits."
    )
    if len(shown) < len(parts):
        caption += f" Drawn are {len(shown)} of {len(parts)} stages; the table has all."
    plot = Plot(title="Peak memory of one device", caption=caption, colors=OF_MEMORY, rules=rules)
    pictures = [draw_parts(plot, rows, Column(title="GiB"))]
    if len(report.memory_timeline.time_ms):
        marked = [Rule("y", device_gib, name)] if device_gib else []
        pictures.append(_memory_over_time(report, marked))
    return Section(
        title="Memory",
        intro=(
            "Allocated is what tensors occupy; reserved is what the allocator takes from the device"
            " for it, with what the driver and communicators hold, and decides whether it fits."
        ),
        pictures=pictures,
        table=_peak_table(report.memory),
    )


def _memory_over_time(report: TrainingReport, rules: Sequence[Rule]) -> Chart:
    columns = report.memory_timeline
    stage = np.asarray(columns.stage, dtype=np.int64)
    times = np.asarray(columns.time_ms, dtype=np.float64)
    held = np.asarray(columns.bytes, dtype=np.float64) / GIB
    all_stages = [int(number) for number in np.unique(stage)]
    fullest = int(stage[held.argmax()])
    shown = sorted({*pick_stages(all_stages, _MAX_CURVES - 1), fullest})
    end = max(report.step_time_ms, float(times.max()))
    curves = [
        _staircase(f"stage {number}", times[stage == number], held[stage == number], end)
        for number in shown
    ]
    caption = "What tensors occupy on one device of a stage, from the step's start to its end."
    if len(shown) < len(all_stages):
        caption += f" Drawn are {len(shown)} of {len(all_stages)} stages, with the fullest."
    plot = Plot(title="Allocated memory over the step", caption=caption, rules=rules)
    x = Column(title="time (ms)")
    return draw_curves(plot, curves, x=x, y=Column(title="GiB"), is_step=True)


def _staircase(
    label: str, times: NDArray[np.float64], values: NDArray[np.float64], end: float
) -> Curve:
    """Return a quantity that keeps each value until the next, up to `end`.

    Of many values it has the lowest and the highest of each part of the time.
    """
    kept = np.arange(len(times))
    if len(times) > _MAX_POINTS:
        parts = np.array_split(kept, _MAX_POINTS // 2)
        kept = np.unique(
            [part[of(values[part])] for part in parts for of in (np.argmin, np.argmax)]
        )
    last = values[-1:]
    return Curve(
        label=label,
        x=np.append(times[kept], end).tolist(),
        y=np.append(values[kept], last).tolist(),
    )


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
