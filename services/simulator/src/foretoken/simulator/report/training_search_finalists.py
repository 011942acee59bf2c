"""The part of a training search's page about what was simulated event by event."""

from collections.abc import Mapping, Sequence

from foretoken.domain.metrics.number_text import describe_step
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.training_search import StrategyFinalist
from foretoken.page.block import Cell, Chart, Column, Table
from foretoken.page.chart import BLUE, GREEN, GREY, VERMILION, Plot
from foretoken.page.curve import draw_parts
from foretoken.page.section import Section
from foretoken.simulator.report.memory_sections import fullest_of, memory_chart
from foretoken.simulator.report.training_search_rows import (
    STEP_PARTS,
    closed_form_error,
    split_step,
)

_OF_STEP_PART: Mapping[str, str] = dict(
    zip(STEP_PARTS, (BLUE, VERMILION, GREY, GREEN), strict=True)
)


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
    Column(title="off by", read=lambda finalist: f"{closed_form_error(finalist):+.2%}"),
    *(Column.of(name).part("report") for name in _OF_REPORT),
    Column.words("verdict", read=_verdict),
)


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
