"""The sections of a page about a training step."""

from collections.abc import Sequence

from foretoken.domain.report import PipelineSpan, StageMemory, TrainingReport, describe_shares
from foretoken.domain.units import GIB, MS_PER_S
from foretoken.page.section import DataTable, Fact, Picture, Section
from foretoken.simulator.report.palette import OF_MEMORY, OF_SPAN, color_of_group, label_of_group
from foretoken.simulator.report.plots import (
    Box,
    draw_ranked,
    draw_stacked_rows,
    draw_timeline,
    format_number,
)
from foretoken.simulator.report.provenance import (
    configuration_section,
    describe_interval,
    provenance_picture,
)

# More boxes than this make a picture nobody can read and a page nobody can load.
_MAX_BOXES = 900
# Steps longer than this are told in seconds.
_MS_IN_SECONDS = 10_000.0


def training_sections(report: TrainingReport) -> list[Section]:
    """Return overview, pipeline, time, memory and configuration of a step."""
    sections = [_overview(report)]
    if report.step_time_ms > 0:
        sections += [_pipeline(report), _time(report)]
    if report.memory:
        sections.append(_memory(report))
    return [*sections, configuration_section(report.scenario_json)]


def _overview(report: TrainingReport) -> Section:
    warning = ""
    if not report.feasibility.is_feasible:
        warning = f"This configuration cannot run: {report.feasibility.reason}."
    if report.step_time_ms == 0:
        return Section(title="Training step", warning=warning)
    scale, unit = (MS_PER_S, "s") if report.step_time_ms > _MS_IN_SECONDS else (1.0, "ms")
    interval = describe_interval(
        report.step_time_low_ms / scale, report.step_time_high_ms / scale, unit
    )
    return Section(
        title="Training step",
        warning=warning,
        intro=(
            "The interval is the step with every operator at its lower, and at its upper, 90 % "
            f"bound. The busy time rests on {describe_shares(report.step_time_ratio_by_provenance)}"
            " estimates."
        ),
        facts=(
            Fact(
                label="step time",
                value=f"{format_number(report.step_time_ms / scale)} {unit}",
                note=interval,
            ),
            Fact(
                label="model FLOP/s utilisation",
                value=f"{report.mfu_ratio:.1%}",
                note="without recomputation",
            ),
            Fact(
                label="pipeline bubble",
                value=f"{report.bubble_ratio:.1%}",
                note="of the step, mean over stages",
            ),
            Fact(
                label="throughput",
                value=f"{format_number(report.tokens_per_s)} tokens/s",
                note=f"{format_number(report.tokens_per_s_per_gpu)} per device, "
                f"{report.num_devices} devices",
            ),
        ),
    )


def _pipeline(report: TrainingReport) -> Section:
    spans, is_cut = _first_spans(report.pipeline)
    boxes = [
        Box(
            row=span.stage,
            start=span.start_ms,
            end=span.end_ms,
            label=_span_label(span),
            text=str(span.micro_batch) if span.kind in ("forward", "backward") else "",
        )
        for span in spans
    ]
    caption = "Numbers are micro batches. A transfer is drawn at its sender."
    if is_cut:
        caption += (
            f" Only the first {format_number(max(box.end for box in boxes))} ms are drawn, "
            f"of {format_number(report.step_time_ms)} ms; the Chrome trace has all of them."
        )
    colors = {name.replace("_", " "): color for name, color in OF_SPAN.items()}
    svg = draw_timeline("pipeline", "What each stage does", "time (ms)", boxes, colors)
    return Section(
        title="Pipeline",
        intro=f"{report.num_micro_batches} micro batches per data-parallel replica.",
        pictures=(Picture(svg=svg, caption=caption),),
    )


def _first_spans(spans: Sequence[PipelineSpan]) -> tuple[list[PipelineSpan], bool]:
    """Return the spans of the step, or those that end before one too many does."""
    if len(spans) <= _MAX_BOXES:
        return list(spans), False
    cut_ms = sorted(span.end_ms for span in spans)[_MAX_BOXES]
    return [span for span in spans if span.end_ms <= cut_ms], True


def _span_label(span: PipelineSpan) -> str:
    return "transfer" if span.kind.startswith("send") else span.kind.replace("_", " ")


def _time(report: TrainingReport) -> Section:
    groups = {
        label_of_group(group): time_ms
        for group, time_ms in report.step_time_ms_by_group.items()
        if time_ms > 0
    }
    colors = {
        label_of_group(group): color_of_group(group) for group in report.step_time_ms_by_group
    }
    return Section(
        title="Where the time goes",
        pictures=(
            Picture(
                svg=draw_ranked("time", "Busiest stage, one step", "ms", groups, colors),
                caption=(
                    "GEMM, attention and elementwise are forward and backward together; "
                    "recompute is the second forward pass. The bubble is waiting for other stages."
                ),
            ),
            provenance_picture(
                "provenance", {"busiest stage": report.step_time_ratio_by_provenance}
            ),
        ),
    )


def _memory(report: TrainingReport) -> Section:
    rows = {f"stage {stage.stage}": _parts_gib(stage) for stage in report.memory}
    device_gib = report.device_memory_bytes / GIB
    svg = draw_stacked_rows(
        "memory",
        "Peak memory of one device",
        "GiB",
        rows,
        OF_MEMORY,
        limit=(device_gib, f"device: {format_number(device_gib)} GiB"),
    )
    header = ["stage", *(f"{name} (GiB)" for name in OF_MEMORY), "total (GiB)", "of the device"]
    table = [
        [
            name,
            *(format_number(parts[part]) for part in OF_MEMORY),
            format_number(sum(parts.values())),
            f"{sum(parts.values()) / device_gib:.0%}",
        ]
        for name, parts in rows.items()
    ]
    return Section(
        title="Memory",
        intro=(
            "Tensors only, computed rather than measured; the allocator reserves about 5 % more, "
            "which decides whether a configuration fits."
        ),
        pictures=(
            Picture(
                svg=svg,
                caption=(
                    "Activations are those of all micro batches a stage holds at once under its "
                    "schedule; temporary is the largest passing need, often the logits."
                ),
            ),
        ),
        table=DataTable(headers=header, rows=table),
    )


def _parts_gib(stage: StageMemory) -> dict[str, float]:
    return {name: getattr(stage, f"{name}_bytes") / GIB for name in OF_MEMORY}
