"""The report of a search for a training strategy, for a terminal."""

from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from foretoken.app.cli.state import page_table, stack
from foretoken.domain.metrics.number_text import describe_step, format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.training_search import StrategyFinalist, TrainingSearchReport
from foretoken.page.block import Column
from foretoken.page.block import Table as PageTable
from foretoken.simulator.report.search_candidates import Row
from foretoken.simulator.report.training_search_rows import (
    OF_CHANGES,
    TO_TELL_APART,
    best_of_layouts,
    best_table,
    closed_form_error,
    describe_ties,
    list_tie_commands,
    ranking_columns,
    report_rows,
    ruled_out_table,
    strategies_per_s,
)
from foretoken.simulator.report.training_search_sections import FINALIST_COLUMNS
from foretoken.simulator.report.what_if import change_columns

_THROUGHPUT = "tokens_per_s_per_gpu"
# What a reason of memory says after what is lacking.
_ADVICE = "; what would help most"


def report_table(
    title: str, report: TrainingSearchReport, num_shown: int, num_tokens: float = 0.0
) -> Table:
    """Return the best strategies, the finalists' simulations, and every strategy counted.

    With `num_tokens` it says what a run to so many takes.
    """
    rows = report_rows(report)
    parts: list[Table | str] = []
    if rows:
        columns = ranking_columns(rows)
        if any(row["placement"] for row in rows):
            columns.append(Column.words("layers", "stage_layers"))
        ranking = PageTable.of(best_of_layouts(rows)[:num_shown], *columns)
        best = best_table(report, rows, num_tokens)
        parts += [page_table(title, ranking), page_table("The best by each measure", best)]
    else:
        parts += ["", f"{title}: no strategy of this space can run and has the memory"]
    if report.finalists:
        table = PageTable.of(report.finalists, *FINALIST_COLUMNS)
        parts.append(page_table("Simulated event by event", _without_advice(table)))
    if report.sensitivities:
        changes = PageTable.of(report.sensitivities, *change_columns(OF_CHANGES))
        parts.append(page_table("What if", changes))
    if report.ruled_out:
        parts.append(page_table("", _without_advice(ruled_out_table(report))))
    return stack(*parts, "", *_answers(report, rows), *_notes(report), _effort(report))


def describe_finalist(finalist: StrategyFinalist) -> str:
    """Return what the simulation of one strategy says, in one line."""
    report = finalist.report
    if not report.feasibility.is_feasible:
        return f"simulated {finalist.name}: {_shorten(report.feasibility.reason)}"
    return (
        f"simulated {finalist.name}: {METRICS[_THROUGHPUT].words(report)} tokens/s per GPU,"
        f" step {describe_step(report.step_time_ms)} (closed form"
        f" {closed_form_error(finalist):+.2%}), {METRICS['reserved_bytes'].words(report)} GiB"
    )


def _without_advice(table: PageTable) -> PageTable:
    """Return a table whose last column has reasons, without the advice that the page has."""
    rows = [(*cells, _shorten(str(reason))) for *cells, reason in table.rows]
    return replace(table, rows=rows)


def _shorten(reason: str) -> str:
    """Return a reason without its advice."""
    return reason.partition(_ADVICE)[0]


def _answers(report: TrainingSearchReport, rows: Sequence[Row]) -> list[str]:
    counts = (
        f"{report.num_points:,} strategies: {report.num_legal:,} can run, {report.num_fitting:,}"
        f" have the memory, {report.num_simulated:,} simulated"
    )
    lines = [counts]
    if not rows:
        return lines
    lines.append("above is the best of each layout")
    lines += describe_ties(report, rows)
    if commands := list_tie_commands(report):
        lines.append(TO_TELL_APART)
        lines += [f"  {command} (its error moves {moved})" for command, moved in commands]
    return lines


def _notes(report: TrainingSearchReport) -> list[str]:
    return [f"- {note}" for note in report.notes]


def _effort(report: TrainingSearchReport) -> str:
    speed = strategies_per_s(report)
    counted = f", {format_number(speed)} strategies/s in closed form" if speed else ""
    return (
        f"{report.wall_s:.3g} s, {report.cpu_s:.3g} s of CPU time, {report.num_shapes:,} shapes of"
        f" layers{counted}, predictor {report.model_version or '(no trained model)'}"
    )
