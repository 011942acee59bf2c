"""`foretoken simulate serving` and `training`: one deployment, one optimizer step."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foretoken.app.cli.output_file import page_option, table_paths, write_page, write_stream
from foretoken.app.cli.state import (
    build_table,
    check_output_path,
    describe_feasibility,
    format_cell,
    item_table,
    leave_unless,
    note,
    note_jobs,
    open_composition,
    scenario_changes,
    show_progress,
    stack,
    state_of,
)
from foretoken.app.scenario_file import read_serving_scenario, read_training_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import ArrowStream
from foretoken.domain.metrics.metric import Figure
from foretoken.domain.metrics.number_text import step_unit
from foretoken.domain.metrics.registry import METRICS, list_figures
from foretoken.domain.metrics.serving import describe_load
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.results.report import PoolReport, ServingReport
from foretoken.domain.results.training_report import TRAINING_TABLES, StageMemory, TrainingReport
from foretoken.domain.units import GIB
from foretoken.simulator.report.question import list_remarks

if TYPE_CHECKING:
    from foretoken.client.facade import Foretoken

_SERVING_TABLES = ("requests", "steps", "series")

_SET_HELP = "Change one key of the scenario: `workload.rate_rps=4`. Repeatable."
# A terminal shows no more stages than this.
_MAX_STAGES = 16
# A part of the step smaller than this share is left out.
_LEAST_SHARE = 0.001


def serving(  # noqa: PLR0913, PLR0917 - a command's options
    context: typer.Context,
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    change: Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP)] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Simulate at this request rate (1/s). Repeat for a load curve."),
    ] = None,
    html: Annotated[Path | None, page_option("--html")] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="Write a table here, as .parquet or .csv: `requests=FILE`, `steps=FILE`,"
            " `series=FILE` (one rate only). Repeatable."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write steps and requests as a Chrome/Perfetto trace here (one rate only).",
            callback=check_output_path,
        ),
    ] = None,
) -> None:
    """Simulate an inference deployment request by request.

    Prints TTFT, ITL, TPOT and end-to-end percentiles, throughput, goodput, utilisation, cost, what
    the pools of a cluster did, and what the estimates rest on. The tables have every request, every
    step of the engines, and the run second by second. The exit status is 3 where nothing can run.

    Example: `foretoken simulate serving docs/examples/serving.yaml --rate 1 --rate 2 --rate 4
    --page load.html`
    """
    state = state_of(context)
    tables = table_paths(table or [], _SERVING_TABLES)
    with open_composition(state) as services:
        resolved = read_serving_scenario(scenario, scenario_changes(change))
        loads = _loads(resolved, rate or [])
        if len(loads) > 1 and (tables or trace):
            raise InvalidRequestError.of_field(
                "--rate", "tables and traces are of one run: give one rate"
            )
        foretoken = services.foretoken("simulator")
        reports = list(_simulate_loads(foretoken, loads))
        state.print_object(
            reports if len(reports) > 1 else reports[0],
            lambda: serving_table(resolved.name, reports),
            *(r.echo for r in reports),
        )
        note_jobs([report.job_id for report in reports])
        read = partial(foretoken.read_serving_table, reports[-1])
        _write_tables(read, tables)
        if trace is not None:
            _write_trace(trace, _trace_serving(read))
        if html is not None:
            _write_serving_page(html, resolved, reports)
        leave_unless(any(report.feasibility.is_feasible for report in reports))


def _write_serving_page(
    path: Path, scenario: ServingScenario, reports: Sequence[ServingReport]
) -> None:
    from foretoken.simulator.report.page import result_sections

    title = f"{scenario.model.name} on {scenario.device}"
    write_page(path, title, result_sections(*reports))


def _loads(
    scenario: ServingScenario, rates: Sequence[float]
) -> Sequence[tuple[str, ServingScenario]]:
    """Return the scenario at every rate, with what to call it; a trace has a rate of its own."""
    workload = scenario.workload
    if not all(rate > 0 for rate in rates):
        raise InvalidRequestError.of_field("--rate", "must be positive")
    if workload.trace_requests:
        if rates:
            reason = "a trace has its own arrivals; stretch them with --set workload.time_scale=..."
            raise InvalidRequestError.of_field("--rate", reason)
        return [(f"simulate {len(workload.trace_requests)} requests of the trace", scenario)]
    return [
        (f"simulate at {rate:g}/s", replace(scenario, workload=replace(workload, rate_rps=rate)))
        for rate in sorted(rates) or [workload.rate_rps]
    ]


def serving_table(title: str, reports: Sequence[ServingReport]) -> Table:
    """Return the table of one or more serving reports, a column per report, and the remarks."""
    rows = [("feasible", *(describe_feasibility(report.feasibility) for report in reports))]
    headers = ["offered requests", *(describe_load(report, 4) for report in reports)]
    if not any(report.feasibility.is_feasible for report in reports):
        return build_table(title, headers, rows)
    served = [report if report.feasibility.is_feasible else None for report in reports]
    figures = [*list_figures("terminal", served), *_pool_figures(reports)]
    rows += [(figure.title, *figure.texts(digits=4, decimals=1)) for figure in figures]
    table = build_table(title, headers, rows)
    notes = dict.fromkeys(text for report in reports for text in report.notes)
    return stack(table, *(f"- {text}" for text in notes)) if notes else table


def _pool_figures(reports: Sequence[ServingReport]) -> Iterator[Figure]:
    """Return the figures of each pool of a cluster."""
    for name in dict.fromkeys(pool.name for report in reports for pool in report.pools):
        pools = [
            next((pool for pool in report.pools if pool.name == name), PoolReport(name=name))
            for report in reports
        ]
        yield from list_figures("pool", pools, prefix=f"{name}: ")


def _simulate_loads(
    foretoken: "Foretoken", loads: Sequence[tuple[str, ServingScenario]]
) -> Iterator[ServingReport]:
    for title, load in loads:
        with show_progress(title) as update:
            yield foretoken.simulate_serving(load, on_progress=update)


def _write_tables(read: Callable[[str], ArrowStream], paths: Mapping[str, Path]) -> None:
    for name, path in paths.items():
        write_stream(read(name), path)
        note(f"{name} written to {path}")


def _trace_serving(read: Callable[[str], ArrowStream]) -> object:
    from foretoken.simulator.perfetto import serving_trace
    from foretoken.wire.arrow import read_table

    return serving_trace(*(read_table(read(name)) for name in ("steps", "requests")))


def _write_trace(path: Path, trace: object) -> None:
    path.write_text(json.dumps(trace), encoding="utf-8")
    note(f"trace written to {path}; open it in https://ui.perfetto.dev")


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
        _write_tables(partial(foretoken.read_training_table, report), tables)
        if html is not None:
            _write_page(html, resolved, report)
        if heat_map is not None:
            _write_heat_map(heat_map, report)
        if trace is not None:
            from foretoken.simulator.perfetto import training_trace

            _write_trace(trace, training_trace(report))
        leave_unless(report.feasibility.is_feasible)


def _write_page(path: Path, scenario: TrainingScenario, report: TrainingReport) -> None:
    from foretoken.simulator.report.page import result_sections

    title = f"{scenario.model.name} on {scenario.layout.num_devices} {scenario.device}"
    write_page(path, title, result_sections(report))


def _write_heat_map(path: Path, report: TrainingReport) -> None:
    from foretoken.simulator.report.rank_traffic import write_traffic_figure

    write_traffic_figure(path, report)
    note(f"heat map written to {path}")


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
    rows.append((f"  90 % interval ({unit})", interval))
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
    title = "Peak memory of one device (GiB)"
    if len(shown) < len(stages):
        title += f", {len(shown)} of {len(stages)} stages with the least margin"
    return item_table(
        title,
        shown,
        {
            "": lambda stage: f"stage {stage.stage}",
            "allocated": lambda stage: f"{stage.total_bytes / GIB:.2f}",
            "reserved": lambda stage: f"{stage.reserved_bytes / GIB:.2f}",
            "margin": lambda stage: f"{stage.margin_bytes / GIB:.2f}",
            "largest part": lambda stage: stage.largest or "-",
        },
    )


def _pick(stages: Sequence[StageMemory]) -> Sequence[StageMemory]:
    """Return the stages with the least margin, in their order."""
    tightest = sorted(stages, key=lambda stage: stage.margin_bytes)[:_MAX_STAGES]
    return sorted(tightest, key=lambda stage: stage.stage)
