"""The sections of a page about one training step or several: pipeline, time, memory, parts."""

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.metrics.metric import largest_first
from foretoken.domain.metrics.number_text import format_number, step_unit
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.results.report import describe_shares
from foretoken.domain.results.training_report import StageMemory, TrainingReport
from foretoken.domain.units import GIB
from foretoken.page.block import Chart, Column, Table, Value
from foretoken.page.chart import Plot
from foretoken.page.curve import Curve, draw_curves, draw_intervals, draw_parts, draw_spans
from foretoken.page.section import Section
from foretoken.simulator.report import memory_sections as peaks
from foretoken.simulator.report import palette, question
from foretoken.simulator.report.rank_traffic import traffic_section
from foretoken.simulator.training.stream_spans import (
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
_TIME_MS = Column(title="time (ms)")

# Steps by their labels; that of a step by itself is empty.
Reports = Mapping[str, TrainingReport]


def training_sections(report: TrainingReport) -> list[Section]:
    """Return overview, pipeline, time, memory, components and configuration of a step."""
    sections = [_overview(report), *step_sections({"": report})]
    if report.memory:
        sections.append(peaks.parts_section(report.memory))
    traffic = traffic_section(report)
    if traffic is not None:
        sections.append(traffic)
    if report.components:
        sections.append(components(report))
    sections += question.remark_sections(question.list_remarks(report))
    return [*sections, question.scenario_section(report.scenario_json)]


def step_sections(reports: Reports) -> list[Section]:
    """Return what steps do when, where their time goes and what they hold, as far as is known."""
    timed = {label: report for label, report in reports.items() if report.step_time_ms > 0}
    drawn = {label: report for label, report in timed.items() if len(report.spans.kind)}
    sections = [pipeline(drawn)] if drawn else []
    if timed:
        sections.append(time(timed))
    if any(report.memory for report in reports.values()):
        sections.append(memory(reports))
    return sections


def pipeline(reports: Reports) -> Section:
    """Return what the stages do when, which can be zoomed; of a long step its beginning.

    Of several steps it is what the stage of each does that waits least, on one scale of time.
    """
    spans = {label: span_arrays(report.spans) for label, report in reports.items()}
    caption = (
        "Communication of a stage that runs besides computation has a row of its own. Point at a"
        " span for its micro batch and times; shift and the wheel zoom."
    )
    title, intro = "What each stage does", ""
    if len(reports) > 1:
        for label, found in spans.items():
            waiting = {stage: of["waiting"] for stage, of in measure_streams(found).items()}
            spans[label] = found.pick(found.stage == min(waiting, key=waiting.__getitem__))
        title, intro = "The critical stages", "The stage that waits least, of every run."
    else:
        (num,) = (report.num_micro_batches for report in reports.values())
        intro = f"{num:,} micro batch{'es' * (num != 1)} per data-parallel replica."
    most, num_spans = _MAX_SPANS // len(spans), max(len(found.kind) for found in spans.values())
    if num_spans > most:
        caption += (
            f" Drawn are the first {most:,} of {num_spans:,} spans; the Chrome trace has all."
        )
    drawn = {label: found.pick(np.arange(len(found.kind)) < most) for label, found in spans.items()}
    return Section(title="Pipeline", intro=intro, pictures=[span_chart(title, drawn, caption)])


def _named(label: str, *words: str) -> str:
    """Return what a row or a curve is called; the step by itself has no label."""
    return ", ".join(word for word in (label, *words) if word)


def _say_cut(label: str, num_shown: int, num: int, which: str = "") -> str:
    """Return how many stages are drawn, where it is not all."""
    few = f" Drawn are {_named(label, f'{num_shown} of {num} stages')}{which}."
    return few if num_shown < num else ""


def span_chart(title: str, spans: Mapping[str, SpanArrays], caption: str) -> Chart:
    """Return the spans of stages as a Gantt chart, of one step or of several by name."""
    columns = (
        *(Column.words("stage", "row"), Column(title="time (ms)", name="start_ms")),
        *(Column(title="until (ms)", name="end_ms"), Column.words("kind")),
        *(Column(title="micro batch"), Column(title="chunk")),
    )
    rows: list[tuple[str | float | None, ...]] = []
    for label, found in spans.items():
        some = found.pick(np.lexsort((found.start_ms, ~found.is_compute, found.stage)))
        named = [
            _named(label, f"stage {stage}{'' if is_compute else ', communication'}")
            for stage, is_compute in zip(some.stage, some.is_compute, strict=True)
        ]
        kinds = [kind_label(kind) for kind in some.kind.tolist()]
        batches = [batch if batch >= 0 else None for batch in some.micro_batch.tolist()]
        times = (some.start_ms.tolist(), some.end_ms.tolist())
        rows += zip(named, *times, kinds, batches, some.chunk.tolist(), strict=True)
    plot = Plot(title=title, caption=caption, colors=palette.OF_STREAM)
    return draw_spans(plot, Table(columns=columns, rows=rows))


def time(reports: Reports) -> Section:
    """Return where the time goes: on the critical stage, on every stage, by axis, and certainty."""
    caption = (
        "GEMM, attention and elementwise are forward and backward together; recompute is the second"
        " forward pass. Communication is what no computation hides; the bubble is waiting for other"
        " stages."
    )
    groups = {label: report.step_time_ms_by_group for label, report in reports.items()}
    pictures = []
    if len(reports) > 1:
        bounds = ("step_time_low_ms", "step_time_ms", "step_time_high_ms")
        of_bounds = attrgetter(*bounds)
        steps = {label: of_bounds(report) for label, report in reports.items()}
        plot = Plot(title="Step time with its interval", caption=palette.BOUNDS_CAPTION)
        pictures.append(draw_intervals(plot, steps, Column.of(METRICS["step_time_ms"])))
    pictures.append(palette.groups_chart("Critical stage, one step", groups, _TIME_MS, caption))
    spans = {label: span_arrays(report.spans) for label, report in reports.items()}
    if any(len(found.kind) for found in spans.values()):
        pictures.append(_streams(spans))
    if any(any(report.communication_ms_by_axis.values()) for report in reports.values()):
        pictures.append(_axes(reports))
    shares = {
        label or "critical stage": report.step_time_ratio_by_provenance
        for label, report in reports.items()
        if report.step_time_ratio_by_provenance
    }
    if shares:
        pictures.append(palette.provenance_chart(shares))
    return Section(title="Where the time goes", pictures=pictures)


def _streams(spans: Mapping[str, SpanArrays]) -> Chart:
    rows: dict[str, Mapping[str, float]] = {}
    cut = ""
    for label, found in spans.items():
        streams = measure_streams(found)
        shown = pick_stages(list(streams), _MAX_BARS // len(spans))
        rows |= {_named(label, f"stage {stage}"): streams[stage] for stage in shown}
        cut += _say_cut(label, len(shown), len(streams))
    caption = (
        "Passes contain the tensor-parallel communication that waits for nothing else. Exposed"
        " communication is transfers, reductions and gathers with no computation during them."
    )
    plot = Plot(title="Every stage, one step", caption=caption + cut, colors=palette.OF_STREAM)
    return draw_parts(plot, rows, _TIME_MS)


def _axes(reports: Reports) -> Chart:
    rows = {}
    for axis in largest_first(report.communication_ms_by_axis for report in reports.values()):
        for label, report in reports.items():
            whole_ms = report.communication_ms_by_axis.get(axis, 0.0)
            exposed_ms = min(report.exposed_ms_by_axis.get(axis, 0.0), whole_ms)
            rows[_named(axis, label)] = {
                "exposed communication": exposed_ms,
                "hidden communication": whole_ms - exposed_ms,
            }
    caption = (
        "By the axis of parallelism that communicates. Hidden communication overlaps computation;"
        " by how much it slows that is the overlap slowdown."
    )
    title = "Communication of the critical stage"
    plot = Plot(title=title, caption=caption, colors=palette.OF_STREAM)
    return draw_parts(plot, rows, _TIME_MS)


def memory(reports: Reports) -> Section:
    """Return the peak of every stage by what holds it, and the memory over the step.

    Of many stages some are drawn, the fullest among them; of several steps the memory of the
    fullest stage of each.
    """
    rows: dict[str, StageMemory] = {}
    cut = ""
    for label, report in reports.items():
        shown = _shown_stages(report.memory, _MAX_BARS // len(reports))
        rows |= {_named(label, f"stage {stage.stage}"): stage for stage in shown}
        cut += _say_cut(label, len(shown), len(report.memory))
    pictures = [peaks.memory_chart(rows, "Peak memory of one device", cut)]
    held = {label: r for label, r in reports.items() if len(r.memory_timeline.time_ms)}
    if held:
        pictures.append(_memory_over_time(held))
    return Section(
        title="Memory",
        intro=(
            "Allocated is what tensors occupy; reserved is what the allocator takes from the device"
            " for it, with what the driver and communicators hold, and decides whether it fits."
        ),
        pictures=pictures,
        table=peaks.peak_table(next(iter(reports.values())).memory) if len(reports) == 1 else None,
    )


def _shown_stages(stages: Sequence[StageMemory], most: int) -> Sequence[StageMemory]:
    if len(stages) <= most:
        return stages
    numbers, fullest = [stage.stage for stage in stages], peaks.fullest_of(stages).stage
    picked = pick_stages(numbers, most)
    if fullest not in picked:
        picked = [*pick_stages(numbers, most - 1), fullest]
    return [stage for stage in stages if stage.stage in picked]


def _memory_over_time(reports: Reports) -> Chart:
    curves: list[Curve] = []
    cut = ""
    for label, report in reports.items():
        columns = report.memory_timeline
        stage = np.asarray(columns.stage, dtype=np.int64)
        times = np.asarray(columns.time_ms, dtype=np.float64)
        held = np.asarray(columns.bytes, dtype=np.float64) / GIB
        all_stages = [int(number) for number in np.unique(stage)]
        others = pick_stages(all_stages, _MAX_CURVES - 1) if len(reports) == 1 else ()
        shown = sorted({*others, int(stage[held.argmax()])})
        end = max(report.step_time_ms, float(times.max()))
        curves += [
            _staircase(_named(label, f"stage {number}"), times[here], held[here], end)
            for number in shown
            for here in (stage == number,)
        ]
        cut += _say_cut(label, len(shown), len(all_stages), ", with the fullest")
    caption = "What tensors occupy on one device of a stage, from the step's start to its end."
    sizes = [size / GIB for report in reports.values() if (size := report.device_memory_bytes)]
    title, rules = "Allocated memory over the step", peaks.device_rules(sizes, "y")
    plot = Plot(title=title, caption=caption + cut, rules=rules)
    return draw_curves(plot, curves, x=_TIME_MS, y=Column(title="GiB"), is_step=True)


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


def components(report: TrainingReport) -> Section:
    """Return the parts of a step that measured steps are compared by, a column per stage."""
    stages = sorted({item.stage for item in report.components})
    shown = pick_stages(stages, _MAX_COLUMNS)
    rows = []
    for name in dict.fromkeys(item.name for item in report.components):
        found = {item.stage: item for item in report.components if item.name == name}
        calls = {item.num_calls for item in found.values()}
        span = f"{min(calls)} to {max(calls)}" if len(calls) > 1 else str(*calls)
        cells = (format_number(found[at].time_ms) if at in found else "-" for at in shown)
        rows.append([name, span, *cells])
    cut = f" Shown are {len(shown)} of {len(stages)} stages." if len(shown) < len(stages) else ""
    return Section(
        title="Components",
        intro=(
            "Mean times in ms of one occurrence, as profiles of training runs tell them; `foretoken"
            " validate training` compares them with measured ones. An encoder is one layer of one"
            " micro batch, a stage one micro batch." + cut
        ),
        table=Table.listed(
            headers=["component", "per step", *(f"stage {stage} (ms)" for stage in shown)],
            rows=rows,
        ),
    )


def _overview(report: TrainingReport) -> Section:
    warning = question.refusal("configuration cannot run", report.feasibility)
    if report.step_time_ms == 0:
        return Section(title="Training step", warning=warning)
    intro = (
        "The interval holds what operators may be off by: families of them err on their own."
        f" The busy time rests on {describe_shares(report.step_time_ratio_by_provenance)}"
        " estimates."
    )
    return Section(
        title="Training step",
        warning=warning,
        intro=intro,
        facts=_facts(report),
    )


def _facts(report: TrainingReport) -> list[Value]:
    scale, unit = step_unit(report.step_time_ms)

    def fact(name: str, time_ms: float, note: str) -> Value:
        return Value(label=METRICS[name].label, value=time_ms / scale, unit=unit, note=note)

    low, high = report.step_time_low_ms / scale, report.step_time_high_ms / scale
    facts = [fact("step_time_ms", report.step_time_ms, palette.describe_interval(low, high, unit))]
    if report.step_time_raw_ms not in (0, report.step_time_ms):
        change = f"calibration: {report.step_time_ms / report.step_time_raw_ms - 1:+.1%}"
        facts.append(fact("step_time_raw_ms", report.step_time_raw_ms, change))
    spread = report.step_spread_ms
    if spread.p99 > spread.p50:
        half, most = (format_number(time_ms / scale) for time_ms in (spread.p50, spread.p90))
        note = f"half {half} {unit}, nine of ten {most} {unit}"
        facts.append(fact("step_spread_ms.p99", spread.p99, note))
    exposed = sum(report.exposed_ms_by_axis.values())
    whole = sum(report.communication_ms_by_axis.values())
    facts += [
        Value.of(
            "tokens_per_s",
            report,
            f"{METRICS['tokens_per_s_per_gpu'].words(report)} per GPU,"
            f" {METRICS['num_devices'].words(report)} GPUs",
        ),
        Value.of("mfu_ratio", report, f"{METRICS['hfu_ratio'].words(report)} HFU"),
        Value.of("bubble_ratio", report, "of the step, mean over stages"),
        Value.of(
            "exposed_communication_ratio",
            report,
            f"of the step; {format_number(exposed)} of {format_number(whole)} ms"
            " on the critical stage",
        ),
    ]
    return facts
