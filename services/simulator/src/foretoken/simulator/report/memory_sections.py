"""The sections of a page about what a training strategy must hold."""

from collections.abc import Sequence

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.requests.training_run import TrainingMemoryReport
from foretoken.domain.results.training_report import StageMemory
from foretoken.domain.units import GIB
from foretoken.page.html import render_sections
from foretoken.page.section import Fact, Section
from foretoken.simulator.report.question import with_echo
from foretoken.simulator.report.stage_memory import (
    fullest_of,
    memory_chart,
    parts_section,
    peak_table,
)
from foretoken.simulator.report.training_sections import scenario_section

_MAX_BARS = 32
_SUBTITLE = "Counted by Foretoken from shapes and schedules; nothing is timed and nothing was run."


def render_memory(title: str, report: TrainingMemoryReport) -> str:
    """Return a memory plan as an HTML page."""
    return render_sections(title, _SUBTITLE, memory_sections(report))


def memory_sections(report: TrainingMemoryReport) -> list[Section]:
    """Return whether a strategy fits, its stages, their parts and the configuration."""
    sections = [_overview(report)]
    if report.memory:
        sections += [_stages(report.memory), parts_section(report.memory)]
    return with_echo([*sections, scenario_section(report.scenario_json)], report.echo)


def _overview(report: TrainingMemoryReport) -> Section:
    warning, facts = "", []
    if not report.feasibility.is_feasible:
        warning = f"This strategy does not fit: {report.feasibility.reason}."
    if report.memory:
        fullest = fullest_of(report.memory)
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
    fullest = sorted(stages, key=lambda stage: stage.margin_bytes)[:_MAX_BARS]
    shown = {
        f"stage {stage.stage}": stage for stage in sorted(fullest, key=lambda stage: stage.stage)
    }
    cut = ""
    if len(stages) > _MAX_BARS:
        cut = f" Drawn are the {_MAX_BARS} fullest of {len(stages)} stages."
    chart = memory_chart(shown, "Peak memory of one device", cut)
    return Section(title="Stages", pictures=[chart], table=peak_table(stages, has_advice=True))
