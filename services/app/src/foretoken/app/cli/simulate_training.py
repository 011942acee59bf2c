"""`foretoken simulate training`: evaluate one optimizer step."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foretoken.app.cli.exit_status import leave_unless
from foretoken.app.cli.page_file import write_page
from foretoken.app.cli.picture_file import page_option
from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import (
    build_table,
    check_output_path,
    describe_feasibility,
    format_cell,
    note,
    note_jobs,
    open_composition,
    scenario_changes,
    show_progress,
    state_of,
)
from foretoken.app.cli.table_file import table_paths, write_stream
from foretoken.app.scenario_file import read_training_scenario
from foretoken.domain.metrics.number_text import step_unit
from foretoken.domain.metrics.registry import METRICS, list_figures
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TRAINING_TABLES, StageMemory, TrainingReport
from foretoken.domain.units import GIB
from foretoken.simulator.report.training_remarks import list_remarks

if TYPE_CHECKING:
    from foretoken.client.facade import Foretoken

# A terminal shows no more stages than this.
_MAX_STAGES = 16
# A part of the step smaller than this share is left out.
_LEAST_SHARE = 0.001


def training(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of the scenario: `layout.pp=4`. Repeatable."),
    ] = None,
    html: Annotated[Path | None, page_option("--html")] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="Write a table here, as .parquet or .csv: `spans=FILE`, `memory=FILE`,"
            " `traffic=FILE`. Repeatable."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write the pipeline as a Chrome/Perfetto trace here.", callback=check_output_path
        ),
    ] = None,
    heat_map: Annotated[
        Path | None,
        typer.Option(
            help="Write a heat map here of what devices send to each other, as .png, .svg or .pdf.",
            callback=check_output_path,
        ),
    ] = None,
) -> None:
    """Simulate one optimizer step: its time and where it goes, its memory, how far to trust it.

    Prints the step with its interval and its spread over steps, tokens per second, MFU and HFU, the
    bubble, the communication nothing hides, and the memory of every stage. The tables have what
    every stage does when (`spans`), what it holds over the step (`memory`) and what devices send
    to each other (`traffic`). The exit status is 3 where it cannot run.

    Example: `foretoken simulate training docs/examples/training.yaml --page step.html --trace
    step.json`
    """
    state = state_of(context)
    tables = table_paths(table or [], TRAINING_TABLES)
    with open_composition(state) as services:
        resolved = read_training_scenario(scenario, scenario_changes(change))
        foretoken = services.foretoken("simulator")
        with show_progress("simulate") as update:
            report = foretoken.simulate_training(resolved, on_progress=update)
        state.print_object(report, lambda: training_table(resolved.name, report), report.echo)
        note_jobs((report.job_id,))
        _write_tables(foretoken, report, tables)
        if html is not None:
            _write_page(html, resolved, report)
        if heat_map is not None:
            _write_heat_map(heat_map, report)
        if trace is not None:
            _write_trace(trace, report)
        leave_unless(report.feasibility.is_feasible)


def _write_page(path: Path, scenario: TrainingScenario, report: TrainingReport) -> None:
    from foretoken.simulator.report.page import training_sections

    title = f"{scenario.model.name} on {scenario.layout.num_devices} {scenario.device}"
    write_page(path, title, training_sections(report))


def _write_heat_map(path: Path, report: TrainingReport) -> None:
    from foretoken.simulator.report.rank_traffic import write_traffic_figure

    write_traffic_figure(path, report)
    note(f"heat map written to {path}")


def _write_trace(path: Path, report: TrainingReport) -> None:
    from foretoken.simulator.report.trace import chrome_trace

    path.write_text(json.dumps(chrome_trace(report)), encoding="utf-8")
    note(f"trace written to {path}; open it in https://ui.perfetto.dev")


def _write_tables(
    foretoken: "Foretoken", report: TrainingReport, paths: Mapping[str, Path]
) -> None:
    for name, path in paths.items():
        write_stream(foretoken.read_training_table(report, name), path)
        note(f"{name} written to {path}")


def training_table(title: str, report: TrainingReport) -> Table:
    """Return a training report for a terminal: the step, where its time goes, memory, remarks."""
    parts: list[Table | str] = [_step_table(title, report)]
    if report.step_time_ms > 0:
        parts.append(_time_table(report))
    if any(report.communication_ms_by_axis.values()):
        parts.append(_communication_table(report))
    if report.memory:
        parts.append(_memory_table(report.memory))
    remarks = [f"- {text}" for text in list_remarks(report)]
    if remarks:
        parts.append("\n" + "\n".join(remarks))
    return stack(*parts)


def _step_table(title: str, report: TrainingReport) -> Table:
    rows: list[tuple[str, object]] = [("feasible", describe_feasibility(report.feasibility))]
    if report.step_time_ms > 0:
        rows += [*_step_rows(report), *_use_rows(report)]
    return build_table(title, ("", "value"), rows)


def _step_rows(report: TrainingReport) -> list[tuple[str, object]]:
    scale, unit = step_unit(report.step_time_ms)
    raw, spread = report.step_time_raw_ms, report.step_spread_ms
    label = METRICS["step_time_ms"].label
    rows: list[tuple[str, object]] = [(f"{label} ({unit})", report.step_time_ms / scale)]
    if raw > 0 and raw != report.step_time_ms:
        change = f"{format_cell(raw / scale)} (calibration: {report.step_time_ms / raw - 1:+.1%})"
        rows.append((f"  not calibrated ({unit})", change))
    bounds = (report.step_time_low_ms, report.step_time_high_ms)
    interval = " to ".join(format_cell(bound / scale) for bound in bounds)
    rows.append((f"  with operators at their bounds ({unit})", interval))
    if spread.p99 > spread.p50:
        quantiles = " / ".join(
            format_cell(value / scale) for value in (spread.p50, spread.p90, spread.p99)
        )
        rows.append((f"  over steps, p50 / p90 / p99 ({unit})", quantiles))
    return rows


def _use_rows(report: TrainingReport) -> list[tuple[str, object]]:
    figures = list_figures("terminal", [report])
    return [(figure.title, figure.texts(digits=4, decimals=1)[0]) for figure in figures]


def _time_table(report: TrainingReport) -> Table:
    groups = report.step_time_ms_by_group
    total = sum(groups.values()) or 1.0
    ranked = sorted(groups.items(), key=lambda item: -item[1])
    rows = [
        (group.replace("_", " "), time_ms, f"{time_ms / total:.1%}")
        for group, time_ms in ranked
        if time_ms > _LEAST_SHARE * total
    ]
    return build_table("Where the time goes", ("critical stage", "ms", "share"), rows)


def _communication_table(report: TrainingReport) -> Table:
    rows = [
        (axis, time_ms, report.exposed_ms_by_axis.get(axis, 0.0))
        for axis, time_ms in sorted(
            report.communication_ms_by_axis.items(), key=lambda item: -item[1]
        )
    ]
    columns = ("communication of the critical stage", "ms", "exposed (ms)")
    return build_table("", columns, rows)


def _memory_table(stages: Sequence[StageMemory]) -> Table:
    shown = _pick(stages)
    rows = [
        (
            f"stage {stage.stage}",
            f"{stage.total_bytes / GIB:.2f}",
            f"{stage.reserved_bytes / GIB:.2f}",
            f"{stage.margin_bytes / GIB:.2f}",
            stage.largest or "-",
        )
        for stage in shown
    ]
    title = "Peak memory of one device (GiB)"
    if len(shown) < len(stages):
        title += f", {len(shown)} of {len(stages)} stages with the least margin"
    return build_table(title, ("", "allocated", "reserved", "margin", "largest part"), rows)


def _pick(stages: Sequence[StageMemory]) -> Sequence[StageMemory]:
    """Return the stages with the least margin, in their order."""
    tightest = sorted(stages, key=lambda stage: stage.margin_bytes)[:_MAX_STAGES]
    return sorted(tightest, key=lambda stage: stage.stage)
