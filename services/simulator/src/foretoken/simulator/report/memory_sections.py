"""What the devices of a pipeline's stages hold at their peaks: bars, tables, and a plan's page."""

from collections.abc import Mapping, Sequence
from typing import Literal

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.requests.training_run import TrainingMemoryReport
from foretoken.domain.results.training_report import StageMemory
from foretoken.domain.units import GIB
from foretoken.page.block import Cell, Chart, Column, Table, Value
from foretoken.page.chart import GREY, Plot, Rule
from foretoken.page.curve import draw_parts
from foretoken.page.html import render_sections
from foretoken.page.section import Section
from foretoken.simulator.report.palette import OF_MEMORY
from foretoken.simulator.report.question import refusal, scenario_section, with_echo

# What the allocator, the driver and communicators take besides tensors.
_RESERVE = "allocator and headroom"
_COLORS = {**OF_MEMORY, _RESERVE: GREY}
_CAPTION = (
    "At the moment each stage holds most. Activations are those of all micro batches it then has in"
    " flight; temporary is what lives within an operator, often the logits. Headroom is what"
    " driver, context and communicators hold of the device."
)


def memory_chart(stages: Mapping[str, StageMemory], title: str, cut: str = "") -> Chart:
    """Draw a stacked bar for every named stage, with the memory of the smallest device marked.

    `cut` says which stages are drawn. Where devices differ, bars say which is theirs.
    """
    sizes = sorted({stage.device_bytes / GIB for stage in stages.values() if stage.device_bytes})
    rows = {
        f"{name} (of {format_number(stage.device_bytes / GIB)} GiB)" if len(sizes) > 1 else name: {
            **{part: getattr(stage, f"{part}_bytes") / GIB for part in OF_MEMORY},
            _RESERVE: max(stage.reserved_bytes + stage.headroom_bytes - stage.total_bytes, 0) / GIB,
        }
        for name, stage in stages.items()
    }
    plot = Plot(title=title, caption=_CAPTION + cut, colors=_COLORS, rules=device_rules(sizes, "x"))
    return draw_parts(plot, rows, Column(title="GiB"))


def device_rules(sizes_gib: Sequence[float], axis: Literal["x", "y"]) -> list[Rule]:
    """Return the mark of the smallest of these devices; none where there is none."""
    if not sizes_gib:
        return []
    least = min(sizes_gib)
    which = "smallest device" if len(set(sizes_gib)) > 1 else "device"
    return [Rule(axis, least, f"{which}: {format_number(least)} GiB")]


def fullest_of(stages: Sequence[StageMemory]) -> StageMemory:
    """Return the stage with the least room."""
    return min(stages, key=lambda stage: stage.margin_bytes)


def peak_table(stages: Sequence[StageMemory], *, has_advice: bool = False) -> Table:
    """Return the peaks of stages, with when they are where it is known; advice if it is wanted."""
    columns = [_STAGE, *(_gib(f"{name} (GiB)", field) for name, field in _SIZES.items())]
    columns.append(Column(title="margin (GiB)", read=_margin))
    if any(stage.peak_ms for stage in stages):
        columns.append(Column(title="peak at (ms)", name="peak_ms"))
    columns += [Column(title="in flight", name="num_in_flight")]
    columns += [Column.words("largest part", "largest")]
    return Table.of(stages, *columns, *([Column.words("advice")] if has_advice else []))


def parts_section(stages: Sequence[StageMemory]) -> Section:
    """Return what holds the memory of every stage at its peak."""
    return Section(
        title="Memory by part",
        intro="Of one device of every stage at its peak, in GiB. The parts add up to the allocated"
        " memory.",
        table=Table.of(stages, _STAGE, *(_gib(name, f"{name}_bytes") for name in OF_MEMORY)),
    )


def _gib(title: str, name: str) -> Column:
    return Column(title=title, name=name, read=lambda stage: f"{getattr(stage, name) / GIB:.2f}")


def _margin(stage: StageMemory) -> Cell | str:
    text = f"{stage.margin_bytes / GIB:.2f}"
    return Cell(value=f"{text}, too little", tone="alert") if stage.margin_bytes < 0 else text


_STAGE = Column.words("stage", read=lambda stage: str(stage.stage))
_SIZES = {
    "allocated": "total_bytes",
    "reserved": "reserved_bytes",
    "headroom": "headroom_bytes",
    "device": "device_bytes",
}


_MAX_BARS = 32
_SUBTITLE = "Counted by Foretoken from shapes and schedules; nothing is timed and nothing was run."


def render_memory(title: str, report: TrainingMemoryReport) -> str:
    """Return a memory plan as an HTML page."""
    return render_sections(title, _SUBTITLE, memory_sections(report))


def memory_sections(report: TrainingMemoryReport) -> list[Section]:
    """Return whether a strategy fits, its stages, their parts and the configuration."""
    sections = [_overview(report)]
    if stages := report.memory:
        fullest = sorted(stages, key=lambda stage: stage.margin_bytes)[:_MAX_BARS]
        shown = {
            f"stage {stage.stage}": stage
            for stage in sorted(fullest, key=lambda stage: stage.stage)
        }
        few = f" Drawn are the {_MAX_BARS} fullest of {len(stages)} stages."
        cut = few if len(stages) > _MAX_BARS else ""
        chart = memory_chart(shown, "Peak memory of one device", cut)
        table = peak_table(stages, has_advice=True)
        sections += [Section(title="Stages", pictures=[chart], table=table), parts_section(stages)]
    sections.append(scenario_section(report.scenario_json))
    return with_echo(sections, report.echo.lines())


def _overview(report: TrainingMemoryReport) -> Section:
    warning, facts = refusal("strategy does not fit", report.feasibility), []
    if report.memory:
        fullest = fullest_of(report.memory)
        sizes = f"stage {fullest.stage}, of {format_number(fullest.device_bytes / GIB)} GiB"
        on = f"on {report.num_devices:,} devices"
        params = report.num_params / 1e9
        held, free = fullest.reserved_bytes / GIB, fullest.margin_bytes / GIB
        facts = [
            Value(label="fullest stage", value=held, unit="GiB", note=sizes),
            Value(label="margin", value=free, unit="GiB", note=f"mostly {fullest.largest}"),
            Value(label="parameters", value=params, unit="billion", note=on),
        ]
    return Section(title="Memory plan", warning=warning, intro=" ".join(report.notes), facts=facts)
