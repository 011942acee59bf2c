"""The sections of a page about the search for a training strategy."""

from collections.abc import Sequence

from foretoken.domain.metrics.number_text import describe_step, format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.training_search import StrategyFinalist, TrainingSearchReport
from foretoken.page.block import Cell, Column, Table, Value
from foretoken.page.chart import BLUE, GREEN, GREY, VERMILION, Plot
from foretoken.page.curve import draw_intervals, draw_parts
from foretoken.page.section import Section
from foretoken.simulator.report import training_search_rows as strategies
from foretoken.simulator.report.fronts import training_fronts_section
from foretoken.simulator.report.memory_sections import fullest_of, memory_chart
from foretoken.simulator.report.question import remark_sections, request_sections, sentence
from foretoken.simulator.report.search_candidates import Row, describe_tied, explain_names
from foretoken.simulator.report.training_search_space import (
    counts_section,
    maps_section,
    placements_section,
)
from foretoken.simulator.report.what_if import what_if_section

_THROUGHPUT, _COST = "tokens_per_s_per_gpu", "usd_per_billion_tokens"
# More ties than these are counted: in words, and as bars.
_MAX_TIES = 3
_MAX_BARS = 20


def training_search_sections(
    report: TrainingSearchReport, num_tokens: float = 0.0
) -> list[Section]:
    """Return what a page says of a search: the answer first, what it rests on last.

    With `num_tokens` it says what a run to so many takes.
    """
    rows = strategies.report_rows(report)
    sections = [_overview(report, rows), counts_section(report)]
    if rows:
        of_run = (
            f"The run goes to {format_number(num_tokens)} tokens, without failures and"
            " checkpoints: `foretoken simulate run` counts these."
        )
        best = Section(
            title="The best by each measure",
            intro=of_run if num_tokens > 0 else "",
            table=strategies.best_table(report, rows, num_tokens),
        )
        sections += [_ranking(rows, report), best]
        if any(row["placement"] for row in rows):
            sections.append(placements_section(rows))
        if strategies.other_ties(report, strategies.find_best(report, rows)):
            sections.append(_ties(report, rows))
        sections.append(training_fronts_section(rows, report.num_fitting))
    if report.cells:
        sections.append(maps_section(report))
    if report.finalists:
        sections.append(finalists_section(report.finalists))
    if report.sensitivities:
        sections.append(
            what_if_section(
                "The whole space answered again with one thing changed, against the best of"
                " today{}. Next to the best of each change stands what today's best makes of it.",
                "Tokens/s per GPU of the best strategy",
                report.sensitivities,
                strategies.find_best(report, rows)["name"] if rows else "",
                strategies.OF_CHANGES,
            )
        )
    origin = f"Predictor {report.model_version or 'no trained model'}"
    requests = request_sections(report, "training", origin)
    return [*sections, *remark_sections(report.notes), *requests]


def _overview(report: TrainingSearchReport, rows: Sequence[Row]) -> Section:
    speed = strategies.strategies_per_s(report)
    counts = (
        f"Of {report.num_points:,} strategies {report.num_legal:,} can run, {report.num_fitting:,}"
        f" have the memory and {report.num_simulated:,} were simulated event by event, in"
        f" {report.wall_s:.3g} s with {report.cpu_s:.3g} s of CPU time"
        + (f"; the closed form counted {format_number(speed)} a second." if speed else ".")
    )
    if not rows:
        return Section(
            title="The best strategy",
            warning="No strategy of this space can run and has the memory; see why below.",
            intro=counts,
        )
    best = strategies.find_best(report, rows)
    ranked_by = strategies.describe_objective(strategies.read_request(report).get("objective", ""))
    tied = describe_tied(strategies.other_ties(report, best), _MAX_TIES)
    return Section(
        title="The best strategy",
        intro=f"{best['name']} ranks first{f' by {ranked_by}' if ranked_by else ''}:"
        f" {strategies.describe_choices(best)}.{tied} {counts}",
        facts=_facts(best),
    )


def _facts(best: Row) -> list[Value]:
    others = ("bubble_ratio", "exposed_communication_ratio")
    low, high = strategies.figure_bounds(best)
    facts = [
        Value.of(_THROUGHPUT, best, low=low, high=high),
        Value(
            label=METRICS["step_time_ms"].label,
            value=describe_step(best["step_time_ms"]),
            note=f"{describe_step(best['step_time_low_ms'])} to"
            f" {describe_step(best['step_time_high_ms'])}",
        ),
        Value.of(
            "mfu_ratio",
            best,
            ", ".join(f"{METRICS[name].label} {METRICS[name].words(best)}" for name in others),
        ),
        Value.of("margin_bytes", best, strategies.describe_devices(best)),
    ]
    if best["usd_per_step"] > 0:
        facts.append(Value.of(_COST, best, f"USD {METRICS['usd_per_step'].words(best)} a step"))
    return facts


def _ranking(rows: Sequence[Row], report: TrainingSearchReport) -> Section:
    shown = strategies.best_of_layouts(rows)
    listed = f" {len(rows):,} of them are listed;" if len(rows) < report.num_fitting else ""
    return Section(
        title="Ranking",
        intro=(
            f"{report.num_fitting:,} strategies can run and have the memory;{listed} this is"
            " the best of each layout, in the order of the estimates. An equals sign marks ties:"
            " such a strategy is behind by less than the error of the difference. Those whose"
            " layers run the same operators share the errors of these, so only the best of them"
            f" ties. {explain_names(row['name'] for row in shown)}"
        ),
        table=Table.of(shown, *strategies.ranking_columns(rows)),
    )


def _ties(report: TrainingSearchReport, rows: Sequence[Row]) -> Section:
    best = strategies.find_best(report, rows)
    names = {best["name"], *strategies.other_ties(report, best)}
    tied = [best, *(row for row in rows if row["name"] in names and row is not best)]
    # Those behind show where a tie ends.
    behind = [row for row in strategies.best_of_layouts(rows) if row["name"] not in names]
    shown = tied[:_MAX_BARS]
    name, _ = strategies.ranked_figure(report)
    title, intervals = METRICS[name].title, {}
    for row in [*shown, *behind[:3]]:
        low, high = strategies.figure_bounds(row, name)
        intervals[row["name"]] = (low, row[name], high)
    in_words = " ".join(sentence(line) for line in strategies.describe_ties(report, rows)[1:])
    to_measure = (
        " " + sentence(f"{strategies.TO_TELL_APART} what is listed below")
        if report.tie_calls
        else " Measure two of them before you believe an order."
    )
    cut = f" Drawn are {len(shown)} of them." if len(shown) < len(names) else ""
    return Section(
        title="Ties",
        intro=f"{len(names):,} strategies cannot be distinguished: they differ from the first"
        f" by less than the error of the difference.{cut} {in_words}{to_measure}",
        table=Table.listed(
            headers=("command", "its error moves"),
            rows=strategies.list_tie_commands(report),
            text_columns=(0, 1),
        )
        if report.tie_calls
        else None,
        pictures=[
            draw_intervals(
                Plot(
                    title=f"{title} and its bounds",
                    caption="Families of operators err on their own. Much"
                    " of an error is common to all strategies and does not change their order, so"
                    " bars that overlap may be in a sure order. The last are the first that do not"
                    " tie.",
                ),
                intervals,
                Column(title=title, name="value"),
            )
        ],
    )


_OF_STEP_PART = {
    "computation": BLUE,
    "exposed communication": VERMILION,
    "bubble": GREY,
    "optimizer": GREEN,
}


def finalists_section(finalists: Sequence[StrategyFinalist]) -> Section:
    """Return the finalists' figures, where their steps go and what their memory holds."""
    plot = Plot(
        title="Critical stage, one step",
        caption="Computation has recomputation in it; exposed communication is what no computation"
        " hides; the bubble is waiting for other stages.",
        colors=_OF_STEP_PART,
    )
    steps = {
        one.name: strategies.split_step(one.report)
        for one in finalists
        if one.report.step_time_ms > 0
    }
    pictures = [draw_parts(plot, steps, Column(title="time (ms)"))] if steps else []
    fullest = {one.name: fullest_of(one.report.memory) for one in finalists if one.report.memory}
    if fullest:
        pictures.append(memory_chart(fullest, "Fullest device of each, at its peak"))
    return Section(
        title="Simulated event by event",
        intro=(
            "The best in closed form, each pass, transfer and collective of the step run on a clock"
            " of its own, and the memory followed allocation by allocation. Where the simulation"
            " and the closed form disagree, believe the simulation."
        ),
        pictures=pictures,
        table=Table.of(finalists, *FINALIST_COLUMNS),
    )


def _verdict(finalist: StrategyFinalist) -> str | Cell:
    feasibility = finalist.report.feasibility
    return "fits" if feasibility.is_feasible else Cell(value=feasibility.reason, tone="alert")


_OF_REPORT = ("tokens_per_s_per_gpu", "mfu_ratio", "bubble_ratio", "margin_bytes")
FINALIST_COLUMNS = (
    Column.words("strategy", "name"),
    Column(title="rank", read=lambda finalist: str(finalist.rank or "-")),
    Column(
        title=METRICS["step_time_ms"].label,
        read=lambda finalist: describe_step(finalist.report.step_time_ms),
    ),
    Column(title="closed form", read=lambda finalist: describe_step(finalist.closed_form_ms)),
    Column(title="off by", read=lambda finalist: f"{strategies.closed_form_error(finalist):+.2%}"),
    *(Column.of(name).part("report") for name in _OF_REPORT),
    Column.words("verdict", read=_verdict),
)
