"""`foretoken validate`: how a simulation compares with what was measured."""

import csv
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table

from foretoken.app.cli.finding_text import finding_lines
from foretoken.app.cli.page_file import write_page
from foretoken.app.cli.picture_file import page_option
from foretoken.app.cli.state import (
    build_table,
    check_output_path,
    note,
    open_composition,
    scenario_changes,
    show_progress,
    state_of,
)
from foretoken.app.cli.validate_steps import steps
from foretoken.app.cli.validate_training import training
from foretoken.app.scenario_file import read_serving_scenario
from foretoken.domain.metrics.metric import title_of
from foretoken.domain.metrics.registry import METRICS
from foretoken.simulator.validation.comparison import STATISTICS, RequestComparison
from foretoken.simulator.validation.decode_step import DecodeComparison
from foretoken.simulator.validation.replay import scenario_of_run
from foretoken.simulator.validation.run_file import load_run
from foretoken.simulator.validation.serving import ServingValidation, validate_serving

app = typer.Typer(help="Compare a simulation with what was measured.", no_args_is_help=True)
app.command()(training)
app.command()(steps)


@app.command()
def serving(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    scenario: Annotated[
        Path, typer.Argument(help="Scenario file: model, device and engine of the server (YAML).")
    ],
    measured: Annotated[
        Path, typer.Option(help="The measured run: a file, or the folder a tool wrote.")
    ],
    format_name: Annotated[
        str, typer.Option("--format", help="Its format; found out by its content if left out.")
    ] = "",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of the scenario: `engine.max_num_seqs=128`."),
    ] = None,
    html: Annotated[Path | None, page_option("--html")] = None,
    requests_csv: Annotated[
        Path | None,
        typer.Option(
            "--csv", help="Write every request, measured and simulated.", callback=check_output_path
        ),
    ] = None,
) -> None:
    """Simulate the workload of a measured run, compare, and say where the difference sits.

    The run may come from `foretoken collect`, from `vllm bench serve --save-result
    --save-detailed`, from AIPerf (`profile_export.jsonl`) or GenAI-Perf (`profile_export.json`), or
    be a CSV table with `arrival_s, input_tokens, output_tokens`, `first_token_s` or `ttft_ms`, and
    `last_token_s` or `e2e_ms`. Its arrivals and lengths replace the scenario's workload; model,
    device, layout and engine are the scenario's.

    Example: `foretoken validate serving server.yaml --measured run.json --page comparison.html`
    """
    state = state_of(context)
    with open_composition(state) as services:
        run = load_run(measured, format_name)
        replayed = scenario_of_run(read_serving_scenario(scenario, scenario_changes(change)), run)
        with show_progress(f"simulate {len(run.completed)} measured requests") as update:
            report = services.foretoken("simulator").simulate_serving(replayed, on_progress=update)
        validation = validate_serving(run, report)
        state.print_object(validation, lambda: _table(validation))
        if requests_csv is not None:
            _write_requests(requests_csv, validation.requests)
            note(f"requests written to {requests_csv}")
        if html is not None:
            from foretoken.simulator.validation.section import validation_sections

            title = f"{replayed.model.name} on {replayed.device}: measured and simulated"
            write_page(html, title, validation_sections(validation))


def _table(validation: ServingValidation) -> Table:
    """Return the figures, then the parts of the error, then the findings, below each other."""
    outer = Table.grid(padding=(0, 0, 1, 0))
    outer.add_row(_figures(validation))
    outer.add_row(_components(validation))
    if validation.decode is not None:
        outer.add_row(_decode_parts(validation.decode))
    outer.add_row(Group(*finding_lines(validation.findings)))
    return outer


def _figures(validation: ServingValidation) -> Table:
    rows: list[Sequence[object]] = [
        (
            title_of(f"{METRICS[metric.name].label} {statistic}", METRICS[metric.name].unit),
            getattr(metric.measured, statistic),
            getattr(metric.simulated, statistic),
            f"{metric.error_ratio(statistic):+.1%}",
        )
        for metric in validation.metrics
        for statistic in STATISTICS
    ]
    rows += [
        (METRICS[rate.name].title, rate.measured, rate.simulated, f"{rate.error_ratio:+.1%}")
        for rate in validation.rates
    ]
    rows += [
        (f"{METRICS[metric.name].label} error per request", "", "", f"{metric.mape_ratio:.1%}")
        for metric in validation.metrics
        if metric.mape_ratio
    ]
    title = f"{validation.run_name}: {validation.num_compared} requests"
    return build_table(title, ("", "measured", "simulated", "error"), rows)


def _components(validation: ServingValidation) -> Table:
    rows = [
        (
            item.name + (" (estimated)" if item.is_estimated else ""),
            item.measured_ms,
            item.simulated_ms,
            f"{item.share_ratio:.0%}",
        )
        for item in validation.components
    ]
    columns = ("part of a mean request", "measured (ms)", "simulated (ms)", "share of the error")
    return build_table("Where the error sits", columns, rows)


def _decode_parts(decode: DecodeComparison) -> Table:
    columns = ("part of a mean decode step", "measured (ms)", "simulated (ms)")
    return build_table("Decode steps, by regression", columns, decode.parts)


def _write_requests(path: Path, requests: Sequence[RequestComparison]) -> None:
    names = [item.name for item in fields(RequestComparison)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(request, name) for name in names] for request in requests)
