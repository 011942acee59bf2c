"""The report of a search for a training strategy, for a terminal."""

from collections.abc import Callable, Sequence

from rich.table import Table

from foretoken.app.cli.state import ItemColumns, build_table, item_table, stack
from foretoken.domain.metrics.number_text import describe_step, format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.training_search import (
    StrategyFinalist,
    StrategySensitivity,
    TrainingSearchReport,
)
from foretoken.simulator.report.search_candidates import Row
from foretoken.simulator.report.training_search_rows import (
    TO_TELL_APART,
    best_by_objective,
    best_of_layouts,
    closed_form_error,
    describe_bounds,
    describe_same,
    describe_ties,
    describe_verdict,
    list_tie_commands,
    make_whole_run,
    read_sequence_length,
    report_rows,
    strategies_per_s,
)
from foretoken.simulator.report.what_if import describe_best_then, describe_change

_THROUGHPUT, _COST = "tokens_per_s_per_gpu", "usd_per_billion_tokens"
_RATIOS = ("mfu_ratio", "bubble_ratio")
_WAITING = ("bubble_ratio", "exposed_communication_ratio")
# Columns of the ranking alone.
_OF_RANKING = ("90 % interval", *(METRICS[name].title for name in _RATIOS))
# What a reason of memory says after what is lacking.
_ADVICE = "; what would help most"
_Column = Callable[[Row], object]


def report_table(
    title: str, report: TrainingSearchReport, num_shown: int, num_tokens: float = 0.0
) -> Table:
    """Return the best strategies, the finalists' simulations, and every strategy counted.

    With `num_tokens` it says what a run to so many takes.
    """
    rows = report_rows(report)
    parts: list[Table | str] = []
    if rows:
        parts += [_ranking(title, rows, num_shown), _best(report, rows, num_tokens)]
    else:
        parts += ["", f"{title}: no strategy of this space can run and has the memory"]
    if report.finalists:
        parts.append(_finalists(report.finalists))
    if report.sensitivities:
        parts.append(_sensitivities(report.sensitivities))
    if report.ruled_out:
        parts.append(_ruled_out(report))
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


def _ranking(title: str, rows: Sequence[Row], num_shown: int) -> Table:
    columns = _columns(rows)
    shown = best_of_layouts(rows)[:num_shown]
    return build_table(
        title, list(columns), [[cell(row) for cell in columns.values()] for row in shown]
    )


def _columns(rows: Sequence[Row]) -> dict[str, _Column]:
    """Return the columns; the price and the layers of stages only where there are any."""
    columns: dict[str, _Column] = {
        "rank": lambda row: row["place"],
        "strategy": lambda row: row["name"],
        **_figures(rows),
    }
    if any(row["placement"] for row in rows):
        columns["layers"] = lambda row: row["stage_layers"]
    return columns


def _figures(rows: Sequence[Row]) -> dict[str, _Column]:
    figures: dict[str, _Column] = {
        METRICS[_THROUGHPUT].title: METRICS[_THROUGHPUT].cell,
        "90 % interval": describe_bounds,
        METRICS["step_time_ms"].label: lambda row: describe_step(row["step_time_ms"]),
        **{METRICS[name].title: METRICS[name].cell for name in (*_RATIOS, "margin_bytes")},
    }
    if any(row[_COST] > 0 for row in rows):
        figures[METRICS[_COST].title] = METRICS[_COST].cell
    return figures


def _best(report: TrainingSearchReport, rows: Sequence[Row], num_tokens: float) -> Table:
    figures = {name: cell for name, cell in _figures(rows).items() if name not in _OF_RANKING}
    if num_tokens > 0:
        figures |= _run_figures(rows, num_tokens, read_sequence_length(report))
    found = [
        (name, row["name"], *(cell(row) for cell in figures.values()))
        for name, row in best_by_objective(report, rows)
    ]
    return build_table("", ("best by", "strategy", *figures), found)


def _run_figures(rows: Sequence[Row], num_tokens: float, length: int) -> dict[str, _Column]:
    figures: dict[str, _Column] = {
        "steps": lambda row: make_whole_run(row, num_tokens, length).num_steps,
        "days": lambda row: make_whole_run(row, num_tokens, length).days,
    }
    if any(row["usd_per_step"] > 0 for row in rows):
        figures["USD in all"] = lambda row: make_whole_run(row, num_tokens, length).usd
    return figures


def _finalists(finalists: Sequence[StrategyFinalist]) -> Table:
    return item_table(
        "",
        finalists,
        {
            "simulated event by event": "name",
            **_of_report(_THROUGHPUT),
            METRICS["step_time_ms"].label: lambda item: describe_step(item.report.step_time_ms),
            "closed form": lambda item: describe_step(item.closed_form_ms),
            "off by": lambda item: f"{closed_form_error(item):+.2%}",
            **_of_report(*_WAITING, "reserved_bytes"),
            "": lambda item: (
                "fits"
                if item.report.feasibility.is_feasible
                else _shorten(item.report.feasibility.reason)
            ),
        },
    )


def _of_report(*names: str) -> ItemColumns[StrategyFinalist]:
    """Return columns of metrics of what a finalist's simulation says."""

    def show(name: str) -> Callable[[StrategyFinalist], object]:
        return lambda item: METRICS[name].cell(item.report)

    return {METRICS[name].title: show(name) for name in names}


def _sensitivities(sensitivities: Sequence[StrategySensitivity]) -> Table:
    return item_table(
        "",
        sensitivities,
        {
            "what if": "change",
            "change": describe_change,
            "today's best": describe_same,
            METRICS[_THROUGHPUT].title: METRICS[_THROUGHPUT].cell,
            METRICS["step_time_ms"].label: lambda item: describe_step(item.step_time_ms),
            "fit": "num_fitting",
            "best then": describe_best_then,
        },
    )


def _ruled_out(report: TrainingSearchReport) -> Table:
    ordered = sorted(report.ruled_out, key=lambda item: -item.num_strategies)
    rows = [
        (describe_verdict(item.verdict), item.num_strategies, item.example, _shorten(item.reason))
        for item in ordered
    ]
    return build_table("", ("ruled out", "strategies", "for example", "because"), rows)


def _shorten(reason: str) -> str:
    """Return a reason without its advice, which the page has."""
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
