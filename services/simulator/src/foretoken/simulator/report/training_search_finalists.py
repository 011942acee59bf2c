"""The part of a training search's page about what was simulated event by event."""

from collections.abc import Mapping, Sequence

from foretoken.domain.metrics.number_text import describe_step
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.training_search import StrategyFinalist
from foretoken.page.block import Cell, Chart, Column
from foretoken.page.chart import BLUE, GREEN, GREY, VERMILION, Plot
from foretoken.page.curve import draw_parts
from foretoken.page.section import DataTable, Section
from foretoken.simulator.report.memory_sections import fullest_of, memory_chart
from foretoken.simulator.report.training_search_rows import (
    STEP_PARTS,
    closed_form_error,
    split_step,
)

_OF_STEP_PART: Mapping[str, str] = dict(
    zip(STEP_PARTS, (BLUE, VERMILION, GREY, GREEN), strict=True)
)


_FIGURES = ("tokens_per_s_per_gpu", "mfu_ratio", "bubble_ratio")


def finalists_section(finalists: Sequence[StrategyFinalist]) -> Section:
    """Return the finalists' figures, where their steps go and what their memory holds."""
    timed = [finalist for finalist in finalists if finalist.report.step_time_ms > 0]
    pictures = [_steps(timed)] if timed else []
    if any(finalist.report.memory for finalist in finalists):
        pictures.append(_memory(finalists))
    return Section(
        title="Simulated event by event",
        intro=(
            "The best in closed form, each pass, transfer and collective of the step run on a clock"
            " of its own, and the memory followed allocation by allocation. Where the simulation"
            " and the closed form disagree, believe the simulation."
        ),
        pictures=pictures,
        table=_table(finalists),
    )


def _table(finalists: Sequence[StrategyFinalist]) -> DataTable:
    headers = (
        *("strategy", "rank", METRICS["step_time_ms"].label, "closed form", "off by"),
        *(METRICS[name].title for name in (*_FIGURES, "margin_bytes")),
        "verdict",
    )
    return DataTable(
        headers=headers,
        rows=[_row(finalist) for finalist in finalists],
        text_columns=(len(headers) - 1,),
    )


def _row(finalist: StrategyFinalist) -> list[str | Cell]:
    report = finalist.report
    reason = report.feasibility.reason
    error = closed_form_error(finalist)
    return [
        finalist.name,
        str(finalist.rank) if finalist.rank else "-",
        describe_step(report.step_time_ms),
        describe_step(finalist.closed_form_ms),
        f"{error:+.2%}",
        *(METRICS[name].words(report) for name in (*_FIGURES, "margin_bytes")),
        "fits" if report.feasibility.is_feasible else Cell(value=reason, tone="alert"),
    ]


def _steps(finalists: Sequence[StrategyFinalist]) -> Chart:
    rows = {finalist.name: split_step(finalist.report) for finalist in finalists}
    caption = (
        "Computation has recomputation in it; exposed communication is what no computation hides;"
        " the bubble is waiting for other stages."
    )
    plot = Plot(title="Critical stage, one step", caption=caption, colors=_OF_STEP_PART)
    return draw_parts(plot, rows, Column(title="time (ms)"))


def _memory(finalists: Sequence[StrategyFinalist]) -> Chart:
    fullest = {
        finalist.name: fullest_of(finalist.report.memory)
        for finalist in finalists
        if finalist.report.memory
    }
    return memory_chart(fullest, "Fullest device of each, at its peak")
