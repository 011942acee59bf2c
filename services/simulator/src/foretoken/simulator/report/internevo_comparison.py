"""What InternEvo's simulator says of its own points, compared with what a search says."""

from collections.abc import Sequence

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.units import GIB
from foretoken.page.block import Table
from foretoken.page.section import Section
from foretoken.simulator.report.question import sentence
from foretoken.simulator.report.search_candidates import Row
from foretoken.simulator.search.internevo.question import InternEvoTerms
from foretoken.simulator.search.internevo.simulator_verdicts import (
    MEMORY_LIMIT_BYTES,
    SimulatorVerdicts,
)


def comparison_table(report: TrainingSearchReport, verdicts: SimulatorVerdicts) -> Table:
    """Return the counts of this search, of the simulator as it is, and mended."""
    num_tried, num_fitting = verdicts.num_tried, verdicts.num_fitting_unrefused
    num_runnable = verdicts.num_legal + verdicts.num_refused
    rows = [
        ("this search", report.num_points, report.num_legal, report.num_fitting),
        ("InternEvo's simulator", num_tried, verdicts.num_legal, verdicts.num_fitting),
        ("the same, each point alone", num_tried, num_runnable, num_fitting),
    ]
    return Table.listed(("counted by", "tried", "can run", "have the memory"), rows)


def comparison_remarks(rows: Sequence[Row], verdicts: SimulatorVerdicts) -> list[str]:
    """Return why the counts differ, and where its solutions stand in `rows`, best first."""
    remarks = []
    if verdicts.num_refused:
        remarks.append(
            f"InternEvo's simulator refuses {verdicts.num_refused:,} points that InternEvo accepts:"
            f" it keeps the number of micro batches of its first point, {verdicts.first_micro_num},"
            " and refuses points of one stage that have another"
        )
    limit = f"{MEMORY_LIMIT_BYTES // GIB} GiB"
    remarks.append(f"its memory is a formula of the first stage, against {limit}")
    listed = verdicts.list_names()
    solutions = [row for row in rows if row["name"] in listed]
    if solutions:
        first, last = solutions[0], solutions[-1]
        behind = 1 - first["tokens_per_s_per_gpu"] / rows[0]["tokens_per_s_per_gpu"]
        place = f"number {first['rank']} here, {behind:.1%} behind the first"
        if first is rows[0]:
            place = "the first here"
        remarks.append(f"the best of its solutions is {place}: {_describe(first)}")
        remarks.append(
            "its report names the solution with the lowest tgs as the best: by the times of this"
            f" search {_describe(last)}"
        )
    return remarks


def comparison_section(
    report: TrainingSearchReport, rows: Sequence[Row], verdicts: SimulatorVerdicts
) -> Section:
    """Return the part of a page that sets both side by side."""
    remarks = [sentence(text) for text in comparison_remarks(rows, verdicts)]
    return Section(
        title="Counted by InternEvo's simulator",
        intro=" ".join(remarks),
        table=comparison_table(report, verdicts),
    )


def _describe(row: Row) -> str:
    """Return a strategy in InternEvo's terms, with its tokens per GPU and second."""
    terms = InternEvoTerms.of_row(row)
    recomputed = ", ckpt" if terms.ckpt else ""
    return (
        f"{terms.algo} pp {terms.pp}, sp {terms.sp}, wp {terms.wp}, zo {terms.zo},"
        f" micro_bsz {terms.micro_bsz}{recomputed}, tgs"
        f" {format_number(row['tokens_per_s_per_gpu'])}"
    )
