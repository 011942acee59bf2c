"""A simulation, or a search through many, as one HTML page."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.domain.requests.search import CapacityReport, ServingSearchReport
from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.result import AnyReport
from foretoken.domain.results.training_report import TrainingReport
from foretoken.page.html import render_sections
from foretoken.page.section import Section
from foretoken.simulator.report.capacity_sections import capacity_sections
from foretoken.simulator.report.compare_sections import compare_sections
from foretoken.simulator.report.search_sections import search_sections
from foretoken.simulator.report.serving_sections import serving_sections
from foretoken.simulator.report.training_run_sections import training_run_sections
from foretoken.simulator.report.training_search_sections import training_search_sections
from foretoken.simulator.report.training_sections import training_sections

__all__ = [
    "capacity_sections",
    "compare_sections",
    "render_page",
    "result_sections",
    "search_sections",
    "serving_sections",
    "training_run_sections",
    "training_search_sections",
    "training_sections",
]

_SUBTITLE = (
    "Simulated by Foretoken. Every time is an estimate; each section says how sure it is and what"
    " it rests on."
)


def render_page(title: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML."""
    return render_sections(title, _SUBTITLE, sections)


_SECTIONS: Mapping[type, Callable[[Any], list[Section]]] = {
    TrainingReport: training_sections,
    TrainingRunReport: training_run_sections,
    ServingReport: lambda report: serving_sections([report]),
    CapacityReport: capacity_sections,
    ServingSearchReport: search_sections,
    TrainingSearchReport: training_search_sections,
}


def result_sections(report: AnyReport) -> list[Section]:
    """Return the sections of one report, as the command that made it writes them."""
    return _SECTIONS[type(report)](report)
