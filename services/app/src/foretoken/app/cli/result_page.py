"""A kept result as a page, as the command that made it writes it."""

from collections.abc import Sequence
from pathlib import Path

from foretoken.app.cli.page_file import write_page
from foretoken.domain.report import ServingReport
from foretoken.domain.result import AnyReport
from foretoken.domain.search import CapacityReport, ServingSearchReport
from foretoken.domain.training_report import TrainingReport
from foretoken.domain.training_run import TrainingRunReport
from foretoken.page.section import Section
from foretoken.simulator.report.page import (
    capacity_sections,
    search_sections,
    serving_sections,
    training_run_sections,
    training_search_sections,
    training_sections,
)


def write_result_page(path: Path, title: str, report: AnyReport) -> None:
    """Write the page of a report, and say so."""
    write_page(path, title, _sections(report))


def _sections(report: AnyReport) -> Sequence[Section]:
    if isinstance(report, TrainingReport):
        return training_sections(report)
    if isinstance(report, TrainingRunReport):
        return training_run_sections(report)
    if isinstance(report, ServingReport):
        return serving_sections([report])
    if isinstance(report, CapacityReport):
        return capacity_sections(report)
    if isinstance(report, ServingSearchReport):
        return search_sections(report)
    return training_search_sections(report)
