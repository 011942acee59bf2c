"""The tables of a page that sets several runs side by side."""

from collections.abc import Sequence
from math import log

from foretoken.domain.metrics.metric import Figure
from foretoken.page.block import Column, Table
from foretoken.page.section import Section
from foretoken.simulator.report.compare_runs import (
    ComparedRun,
    compare_figures,
    configuration_of,
    list_changes,
    list_remarks,
    list_warnings,
    shorten,
)

# Longer values of a configuration are cut.
_MAX_LETTERS = 80


def compare_tables(runs: Sequence[ComparedRun]) -> list[Section]:
    """Return the runs, what differs in what was asked and in what came of it."""
    return [_overview(runs), _changes(runs), _figures(runs)]


def _overview(runs: Sequence[ComparedRun]) -> Section:
    table = Table.of(
        runs,
        Column.words("run", "label"),
        Column.words("answer", "headline").part("result"),
        Column.words("of", "title").part("result"),
        Column.words(
            "at (UTC)", read=lambda run: run.result.created_at.partition(".")[0].replace("T", " ")
        ),
        Column.words("predictor", read=lambda run: run.report.model_version or "no trained model"),
        Column.words("job", "job_id").part("result"),
    )
    intro = " ".join(list_remarks(runs))
    return Section(title="Runs", warning=" ".join(list_warnings(runs)), intro=intro, table=table)


def _changes(runs: Sequence[ComparedRun]) -> Section:
    changes = list_changes([configuration_of(run.report) for run in runs])
    rows = [
        (change.path, *(shorten(value, _MAX_LETTERS) for value in change.values))
        for change in changes
    ]
    headers = ("key", *(run.letter for run in runs))
    return Section(
        title="What differs in the configurations",
        intro=(
            "Keys of the resolved configurations, a dash where one is absent. A model of another"
            " name is one difference."
            if rows
            else "Nothing."
        ),
        table=Table.listed(headers=headers, rows=rows, text_columns=range(1, len(headers)))
        if rows
        else None,
    )


def _figures(runs: Sequence[ComparedRun]) -> Section:
    figures = compare_figures([run.report for run in runs])
    first, *others = runs
    ratios = (f"{run.letter} / {first.letter}" for run in others)
    # What differs most comes first, and what is the same last.
    ordered = sorted(figures, key=lambda figure: -_difference(figure))
    rows = [
        (
            figure.title,
            *figure.texts(),
            *(figure.describe_ratio(place) for place in range(1, len(runs))),
        )
        for figure in ordered
    ]
    return Section(
        title="Figures",
        intro="What differs most comes first.",
        table=Table.listed(("figure", *(run.letter for run in runs), *ratios), rows),
    )


def _difference(figure: Figure) -> float:
    """Return how far values are from the first, as a logarithm; those that have no ratio last."""
    ratios = [ratio for ratio in figure.ratios if ratio]
    return max((abs(log(ratio)) for ratio in ratios), default=0.0)
