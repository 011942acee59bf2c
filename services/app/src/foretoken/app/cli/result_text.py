"""A kept result for a terminal, as the command that made it prints it."""

import json
from dataclasses import replace

from rich.table import Table

from foretoken.app.cli import search_text, search_training_text
from foretoken.app.cli.echo_text import with_echo
from foretoken.app.cli.search_capacity import capacity_table
from foretoken.app.cli.simulate_run import run_table
from foretoken.app.cli.simulate_serving import serving_table
from foretoken.app.cli.simulate_training import training_table
from foretoken.domain import schema
from foretoken.domain.requests.search import CapacityReport, ServingSearchReport
from foretoken.domain.requests.training_run import TrainingRunReport, TrainingRunRequest
from foretoken.domain.results.report import RequestColumns, SeriesColumns, ServingReport
from foretoken.domain.results.result import AnyReport
from foretoken.domain.results.training_report import (
    MemoryColumns,
    SpanColumns,
    TrafficColumns,
    TrainingReport,
)
from foretoken.simulator.report.training_search_rows import describe_search

# As many layouts as searches print unless told.
_NUM_SHOWN = 10


def result_table(title: str, report: AnyReport) -> Table:
    """Return the tables of a report below each other, and what it rests on."""
    return with_echo(_table(title, report), report.echo)


def _table(title: str, report: AnyReport) -> Table:
    if isinstance(report, TrainingReport):
        return training_table(title, report)
    if isinstance(report, TrainingRunReport):
        request = schema.decode(TrainingRunRequest, json.loads(report.request_json), "request")
        return run_table(request, report)
    if isinstance(report, ServingReport):
        return serving_table(title, [report])
    if isinstance(report, CapacityReport):
        return capacity_table(title, report)
    if isinstance(report, ServingSearchReport):
        return search_text.report_table(title, report, _NUM_SHOWN)
    return search_training_text.report_table(describe_search(report), report, _NUM_SHOWN)


def plain_report(report: AnyReport) -> AnyReport:
    """Return a report without its long columns; those of a search's candidates stay."""
    if isinstance(report, ServingReport):
        return _without_requests(report)
    if isinstance(report, CapacityReport):
        return replace(report, at_capacity=_without_requests(report.at_capacity))
    if isinstance(report, TrainingReport):
        return replace(
            report, spans=SpanColumns(), memory_timeline=MemoryColumns(), traffic=TrafficColumns()
        )
    return report


def _without_requests(report: ServingReport) -> ServingReport:
    return replace(report, requests=RequestColumns(), series=SeriesColumns())
