"""The sections of a page about what a training strategy must hold."""

from collections.abc import Mapping, Sequence

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.requests.training_run import TrainingMemoryReport
from foretoken.domain.results.training_report import StageMemory
from foretoken.domain.units import GIB
from foretoken.page.block import Chart, Column
from foretoken.page.chart import GREY, Plot, Rule
from foretoken.page.curve import draw_parts
from foretoken.page.html import render_sections
from foretoken.page.section import Cell, DataTable, Fact, Section
from foretoken.simulator.report.echo_section import with_echo
from foretoken.simulator.report.palette import OF_MEMORY
from foretoken.simulator.report.training_detail import memory_parts
from foretoken.simulator.report.training_sections import scenario_section

_MAX_BARS = 32
# What the allocator, the driver and communicators take besides tensors.
_RESERVE = "allocator and headroom"
_COLORS = {**OF_MEMORY, _RESERVE: GREY}


_SUBTITLE = "Counted by Foretoken from shapes and schedules; nothing is timed and nothing was run."


def render_memory(title: str, report: TrainingMemoryReport) -> str:
    """Return a memory plan as an HTML page."""
    return render_sections(title, _SUBTITLE, memory_sections(report))


def memory_sections(report: TrainingMemoryReport) -> list[Section]:
    """Return whether a strategy fits, its stages, their parts and the configuration."""
    sections = [_overview(report)]
    if report.memory:
        sections += [_stages(report.memory), memory_parts(report.memory)]
    return with_echo([*sections, scenario_section(report.scenario_json)], report.echo)


def _overview(report: TrainingMemoryReport) -> Section:
    warning, facts = "", []
    if not report.feasibility.is_feasible:
        warning = f"This strategy does not fit: {report.feasibility.reason}."
    if report.memory:
        fullest = min(report.memory, key=lambda stage: stage.margin_bytes)
        facts = [
            Fact(
                label="fullest stage",
                value=f"{format_number(fullest.reserved_bytes / GIB)} GiB",
                note=f"stage {fullest.stage}, of {format_number(fullest.device_bytes / GIB)} GiB",
            ),
            Fact(
                label="margin",
                value=f"{format_number(fullest.margin_bytes / GIB)} GiB",
                note=f"mostly {fullest.largest}",
            ),
            Fact(
                label="parameters",
                value=f"{format_number(report.num_params / 1e9)} billion",
                note=f"on {report.num_devices:,} devices",
            ),
        ]
    return Section(title="Memory plan", warning=warning, intro=" ".join(report.notes), facts=facts)


def _stages(stages: Sequence[StageMemory]) -> Section:
    caption = (
        "At the moment each stage holds most. Activations are those of all micro batches it then"
        " has in flight; temporary is what lives within an operator, often the logits. Headroom is"
        " what driver, context and communicators hold of the device."
    )
    if len(stages) > _MAX_BARS:
        caption += f" Drawn are the {_MAX_BARS} fullest of {len(stages)} stages."
    chart = stages_chart(stages, "Peak memory of one device", caption)
    return Section(title="Stages", pictures=[chart], table=_table(stages))


def stages_chart(stages: Sequence[StageMemory], title: str, caption: str = "") -> Chart:
    """Draw a stacked bar for every stage, next to the memory of the smallest device."""
    fullest = sorted(stages, key=lambda stage: stage.margin_bytes)[:_MAX_BARS]
    shown = sorted(fullest, key=lambda stage: stage.stage)
    sizes = sorted({stage.device_bytes / GIB for stage in stages})
    if len(sizes) == 1:
        rows = {f"stage {stage.stage}": _parts_gib(stage) for stage in shown}
        limit = f"device: {format_number(sizes[0])} GiB"
    else:
        rows = {_with_device(stage): _parts_gib(stage) for stage in shown}
        limit = f"smallest device: {format_number(sizes[0])} GiB"
    rules = [Rule("x", sizes[0], limit)]
    plot = Plot(title=title, caption=caption, colors=_COLORS, rules=rules)
    return draw_parts(plot, rows, Column(title="GiB"))


def _with_device(stage: StageMemory) -> str:
    return f"stage {stage.stage} (of {format_number(stage.device_bytes / GIB)} GiB)"


def _parts_gib(stage: StageMemory) -> Mapping[str, float]:
    parts = {name: getattr(stage, f"{name}_bytes") / GIB for name in OF_MEMORY}
    besides = stage.reserved_bytes + stage.headroom_bytes - stage.total_bytes
    return {**parts, _RESERVE: besides / GIB}


def _table(stages: Sequence[StageMemory]) -> DataTable:
    rows = [
        [
            str(stage.stage),
            f"{stage.reserved_bytes / GIB:.2f}",
            f"{stage.headroom_bytes / GIB:.2f}",
            f"{stage.device_bytes / GIB:.2f}",
            _margin(stage),
            format_number(stage.num_in_flight),
            stage.largest,
            stage.advice,
        ]
        for stage in stages
    ]
    headers = ["stage", "reserved (GiB)", "headroom (GiB)", "device (GiB)", "margin (GiB)"]
    headers += ["in flight", "largest part", "advice"]
    return DataTable(headers=headers, rows=rows, text_columns=(6, 7))


def _margin(stage: StageMemory) -> Cell | str:
    text = f"{stage.margin_bytes / GIB:.2f}"
    return Cell(text=f"{text}, too little", tone="alert") if stage.margin_bytes < 0 else text
