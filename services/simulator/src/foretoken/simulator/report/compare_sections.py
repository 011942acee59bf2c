"""The sections of a page that sets several runs side by side."""

from collections.abc import Sequence

from foretoken.domain.requests.search import CapacityReport, ServingSearchReport
from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.training_report import TrainingReport
from foretoken.page.section import DataTable, Section
from foretoken.simulator.report.compare_capacity import capacity_pictures
from foretoken.simulator.report.compare_runs import (
    ComparedRun,
    compare_figures,
    configuration_of,
    list_changes,
    list_echoes,
    list_remarks,
    list_warnings,
)
from foretoken.simulator.report.compare_search import search_pictures
from foretoken.simulator.report.compare_serving import serving_pictures
from foretoken.simulator.report.compare_training import training_pictures
from foretoken.simulator.report.compare_training_runs import training_run_pictures
from foretoken.simulator.report.echo_section import with_lines

# Longer values of a configuration are cut.
_MAX_LETTERS = 80


def compare_sections(runs: Sequence[ComparedRun]) -> list[Section]:
    """Return the runs, what differs between their configurations, pictures, and all figures."""
    sections = [_overview(runs), _changes(runs), *_pictures(runs), _figures(runs)]
    return with_lines(sections, list_echoes(runs))


def _overview(runs: Sequence[ComparedRun]) -> Section:
    rows = [
        (
            run.label,
            run.result.headline,
            run.result.title,
            run.result.created_at.partition(".")[0].replace("T", " "),
            run.report.model_version or "no trained model",
            run.result.job_id,
        )
        for run in runs
    ]
    headers = ("run", "answer", "of", "at (UTC)", "predictor", "job")
    return Section(
        title="Runs",
        warning=" ".join(list_warnings(runs)),
        intro=" ".join(list_remarks(runs)),
        table=DataTable(headers=headers, rows=rows, text_columns=range(1, len(headers))),
    )


def _changes(runs: Sequence[ComparedRun]) -> Section:
    changes = list_changes([configuration_of(run.report) for run in runs])
    rows = [(change.path, *(_cut(value) for value in change.values)) for change in changes]
    headers = ("key", *(run.letter for run in runs))
    return Section(
        title="What differs in the configurations",
        intro=(
            "Keys of the resolved configurations, a dash where one is absent. A model of another"
            " name is one difference."
            if rows
            else "Nothing."
        ),
        table=DataTable(headers=headers, rows=rows, text_columns=range(1, len(headers)))
        if rows
        else None,
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LETTERS else text[: _MAX_LETTERS - 1] + "…"


def _pictures(runs: Sequence[ComparedRun]) -> list[Section]:
    """Return the sections of a kind; all runs are of one."""
    training, planned, serving, capacities, searches = {}, {}, {}, {}, {}
    for run in runs:
        report = run.report
        if isinstance(report, TrainingReport):
            training[run.label] = report
        elif isinstance(report, TrainingRunReport):
            planned[run.label] = report
        elif isinstance(report, ServingReport):
            serving[run.label] = report
        elif isinstance(report, CapacityReport):
            capacities[run.label] = report
        elif isinstance(report, ServingSearchReport | TrainingSearchReport):
            searches[run.label] = report
    if training:
        return training_pictures(training)
    if planned:
        return training_run_pictures(planned)
    if serving:
        return serving_pictures(serving)
    return capacity_pictures(capacities) if capacities else search_pictures(searches)


def _figures(runs: Sequence[ComparedRun]) -> Section:
    figures = compare_figures([run.report for run in runs])
    first, *others = runs
    headers = (
        "figure",
        *(run.letter for run in runs),
        *(f"{run.letter} / {first.letter}" for run in others),
    )
    rows = [
        (
            figure.title,
            *figure.texts(),
            *(figure.describe_ratio(place) for place in range(1, len(runs))),
        )
        for figure in figures
    ]
    return Section(title="Figures", table=DataTable(headers=headers, rows=rows))
