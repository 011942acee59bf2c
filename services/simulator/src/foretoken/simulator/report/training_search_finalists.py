"""The part of a training search's page about what was simulated event by event."""

from collections.abc import Mapping, Sequence

from foretoken.domain.metrics.number_text import describe_step, format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.training_search import StrategyFinalist
from foretoken.domain.results.training_report import StageMemory
from foretoken.domain.units import GIB
from foretoken.page.figure import BLUE, GREEN, GREY, VERMILION
from foretoken.page.section import Cell, DataTable, Picture, Section
from foretoken.simulator.report.palette import OF_MEMORY
from foretoken.simulator.report.plots import draw_stacked_rows
from foretoken.simulator.report.training_detail import parts_gib
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
        "fits" if report.feasibility.is_feasible else Cell(text=reason, tone="alert"),
    ]


def _steps(finalists: Sequence[StrategyFinalist]) -> Picture:
    rows = {finalist.name: split_step(finalist.report) for finalist in finalists}
    return Picture(
        svg=draw_stacked_rows(
            "training-finalists", "Critical stage, one step", "time (ms)", rows, _OF_STEP_PART
        ),
        caption=(
            "Computation has recomputation in it; exposed communication is what no computation"
            " hides; the bubble is waiting for other stages."
        ),
    )


def _memory(finalists: Sequence[StrategyFinalist]) -> Picture:
    fullest = {
        finalist.name: min(finalist.report.memory, key=lambda stage: stage.margin_bytes)
        for finalist in finalists
        if finalist.report.memory
    }
    sizes = {stage.device_bytes / GIB for stage in fullest.values() if stage.device_bytes}
    limit = (max(sizes), f"device: {format_number(max(sizes))} GiB") if len(sizes) == 1 else None
    return Picture(
        svg=draw_stacked_rows(
            "training-finalists-memory",
            "Fullest device of each, at its peak",
            "GiB",
            {name: _held_gib(stage) for name, stage in fullest.items()},
            {**OF_MEMORY, "held besides": GREY},
            limit=limit,
        ),
        caption=(
            "What tensors occupy by kind; held besides is what the allocator, the driver and"
            " communicators take of the device for it."
        ),
    )


def _held_gib(stage: StageMemory) -> Mapping[str, float]:
    besides = max(stage.reserved_bytes + stage.headroom_bytes - stage.total_bytes, 0.0) / GIB
    return {**parts_gib(stage), "held besides": besides}
