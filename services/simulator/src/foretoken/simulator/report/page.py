"""A simulation, a search through many, or several of a kind side by side, as one HTML page."""

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
from foretoken.simulator.comparison import ComparedRun, list_echoes
from foretoken.simulator.report.capacity_sections import capacity_charts, capacity_sections
from foretoken.simulator.report.compare_sections import compare_tables, search_charts
from foretoken.simulator.report.question import with_echo
from foretoken.simulator.report.search_sections import search_sections
from foretoken.simulator.report.serving_sections import serving_charts, serving_sections
from foretoken.simulator.report.training_run_sections import (
    training_run_charts,
    training_run_sections,
)
from foretoken.simulator.report.training_search_sections import training_search_sections
from foretoken.simulator.report.training_sections import step_sections, training_sections

_SUBTITLE = (
    "Simulated by Foretoken. Every time is an estimate; each section says how sure it is and what"
    " it rests on."
)


def render_page(title: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML."""
    return render_sections(title, _SUBTITLE, sections)


# What a page says of a result of each kind, and the charts of several by their labels.
_KINDS: Mapping[type, tuple[Callable[..., list[Section]], Callable[[Any], list[Section]]]] = {
    TrainingReport: (training_sections, step_sections),
    TrainingRunReport: (training_run_sections, training_run_charts),
    ServingReport: (lambda *reports: serving_sections(reports), serving_charts),
    CapacityReport: (capacity_sections, capacity_charts),
    ServingSearchReport: (search_sections, search_charts),
    TrainingSearchReport: (training_search_sections, search_charts),
}


def result_sections(*reports: AnyReport, **options: float) -> list[Section]:
    """Return the sections of a report, or of a deployment's under several loads.

    A search for a strategy takes `num_tokens`, of a run that its best are for.
    """
    sections, _ = _KINDS[type(reports[0])]
    lines = (line for report in reports for line in report.echo.lines())
    return with_echo(sections(*reports, **options), lines)


def compare_sections(runs: Sequence[ComparedRun]) -> list[Section]:
    """Return the runs, what differs in what was asked and in what came of it, and charts."""
    # All runs are of one kind.
    _, charts = _KINDS[type(runs[0].report)]
    drawn = charts({run.label: run.report for run in runs})
    return with_echo([*compare_tables(runs), *drawn], list_echoes(runs))
