"""`foretoken simulate serving`: evaluate a serving deployment."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
    note,
    note_jobs,
    open_composition,
    scenario_changes,
    show_progress,
    state_of,
)
from foretoken.app.cli.table_file import table_paths, write_stream
from foretoken.app.scenario_file import read_serving_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.metric import Figure
from foretoken.domain.metrics.registry import list_figures
from foretoken.domain.metrics.serving import describe_load
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import PoolReport, ServingReport

if TYPE_CHECKING:
    from foretoken.client.facade import Foretoken

_TABLES = ("requests", "steps", "series")

_SET_HELP = "Change one key of the scenario: `workload.rate_rps=4`. Repeatable."


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
    tables = table_paths(table or [], _TABLES)
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
        _write_tables(foretoken, reports[-1], tables)
        if trace is not None:
            _write_serving_trace(foretoken, reports[-1], trace)
        if html is not None:
            _write_page(html, resolved, reports)
        leave_unless(any(report.feasibility.is_feasible for report in reports))


def _write_page(path: Path, scenario: ServingScenario, reports: Sequence[ServingReport]) -> None:
    from foretoken.simulator.report.page import serving_sections

    title = f"{scenario.model.name} on {scenario.device}"
    write_page(path, title, serving_sections(reports))


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


def _write_tables(foretoken: "Foretoken", report: ServingReport, paths: Mapping[str, Path]) -> None:
    for name, path in paths.items():
        write_stream(foretoken.read_serving_table(report, name), path)
        note(f"{name} written to {path}")


def _write_serving_trace(foretoken: "Foretoken", report: ServingReport, path: Path) -> None:
    from foretoken.simulator.report.serving_trace import chrome_trace
    from foretoken.wire.arrow import read_table

    steps, requests = (
        read_table(foretoken.read_serving_table(report, name)) for name in ("steps", "requests")
    )
    path.write_text(json.dumps(chrome_trace(steps, requests)), encoding="utf-8")
    note(f"trace written to {path}; open it in https://ui.perfetto.dev")
