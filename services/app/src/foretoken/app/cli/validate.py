"""`foretoken validate`: how a simulation compares with what was measured."""

import csv
import statistics
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table

from foretoken.app.cli.output_file import page_option, write_page
from foretoken.app.cli.state import (
    build_table,
    check_output_path,
    format_cell,
    note,
    open_composition,
    scenario_changes,
    show_progress,
    stack,
    state_of,
)
from foretoken.app.cli.validate_steps import steps
from foretoken.app.scenario_file import read_serving_scenario, read_training_scenario
from foretoken.client.facade import Foretoken
from foretoken.domain.metrics.metric import title_of
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.validation.decode_steps import DecodeComparison
from foretoken.simulator.validation.finding import Finding
from foretoken.simulator.validation.measured_run import load_run, scenario_of_run
from foretoken.simulator.validation.serving import ServingValidation, validate_serving
from foretoken.simulator.validation.serving_comparison import STATISTICS, RequestComparison
from foretoken.simulator.validation.training import TrainingValidation, validate_training
from foretoken.simulator.validation.training_comparison import ComponentComparison, score_runs
from foretoken.simulator.validation.training_run import ALL_STAGES, MeasuredTraining, read_run

app = typer.Typer(help="Compare a simulation with what was measured.", no_args_is_help=True)


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
            from foretoken.simulator.validation.serving_page import validation_sections

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


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return a paragraph for each finding; advice that was given is not given again."""
    given: set[str] = set()
    lines = []
    for item in findings:
        advice = "" if item.advice in given else f"\n  -> {item.advice}"
        given |= {item.advice, ""}
        lines.append(f"- {item.text}" + (advice if item.advice else ""))
    return lines


@app.command()
def training(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    scenarios: Annotated[
        list[Path],
        typer.Argument(help="Scenario files of the configurations that were measured (YAML)."),
    ],
    measured: Annotated[
        Path, typer.Option(help="Measured steps: a table, or a folder with GPUModeling25's.")
    ],
    run: Annotated[
        str,
        typer.Option(
            help="Which of several configurations in it; the scenario's name if left out."
        ),
    ] = "",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of the scenario: `layout.pp=4`. Repeatable."),
    ] = None,
    html: Annotated[Path | None, page_option("--html")] = None,
    components_csv: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            help="Write the step and every component, measured and simulated.",
            callback=check_output_path,
        ),
    ] = None,
) -> None:
    """Simulate training steps, compare with measured ones, and say where the error comes from.

    A table has `time_ms`, one row per step, and may have `component` (`step`, `encoder_fwd`,
    `stage_bwd`, `dp_allreduce`, ...), `stage`, `flags` and `scenario`. Flagged rows are shown and
    not scored. Of several scenarios the errors of all are summed up as well.

    Example: `foretoken validate training docs/examples/training.yaml --measured
    docs/examples/measured-steps.csv --page comparison.html`
    """
    state = state_of(context)
    if run and len(scenarios) > 1:
        raise typer.BadParameter("--run names the configuration of one scenario")
    with open_composition(state) as services:
        foretoken = services.foretoken("simulator")
        read = [read_training_scenario(path, scenario_changes(change)) for path in scenarios]
        runs = [read_run(measured, run or scenario.name) for scenario in read]
        pairs = zip(read, runs, strict=True)
        validations = [_validate(foretoken, scenario, run_of_it) for scenario, run_of_it in pairs]
    state.print_object(
        validations if len(validations) > 1 else validations[0],
        lambda: validations_table(validations),
    )
    if components_csv is not None:
        _write_components(components_csv, validations)
        note(f"components written to {components_csv}")
    if html is not None:
        _write_page(html, read, validations)


def _validate(
    foretoken: Foretoken, scenario: TrainingScenario, run: MeasuredTraining
) -> TrainingValidation:
    with show_progress(f"simulate {scenario.name}") as update:
        report = foretoken.simulate_training(scenario, on_progress=update)
    return validate_training(run, report, scenario)


def _write_page(
    path: Path, scenarios: Sequence[TrainingScenario], validations: Sequence[TrainingValidation]
) -> None:
    from foretoken.simulator.validation.training_page import training_validation_sections

    named = [f"{item.model.name} on {item.layout.num_devices} {item.device}" for item in scenarios]
    title = f"{', '.join(dict.fromkeys(named))}: measured and simulated"
    write_page(path, title, training_validation_sections(validations))


def validations_table(validations: Sequence[TrainingValidation]) -> Table:
    """Return validations for a terminal, below each other; the errors of all runs come last."""
    parts: list[Table | str] = [validation_table(validation) for validation in validations]
    if len(validations) > 1:
        parts.append(_runs(validations))
    return stack(*parts)


def _runs(validations: Sequence[TrainingValidation]) -> Table:
    scores = score_runs([validation.components for validation in validations])
    rows: list[tuple[object, ...]] = [
        (name, *(f"{item.mape_ratio:.1%}" if item.num_scored else "-" for item in row))
        for name, row in scores.items()
    ]
    errors = [validation.step.error_ratio for validation in validations]
    mean = statistics.fmean(map(abs, errors))
    rows.append(("step, with its sign", *(f"{error:+.1%}" for error in errors), f"{mean:.1%}"))
    columns = ("component", *(item.run_name for item in validations), "all runs")
    return build_table("Errors of all runs, means without signs", columns, rows)


def validation_table(validation: TrainingValidation) -> Table:
    """Return a validation for a terminal: components, errors, stability, shares, findings."""
    parts: list[Table | str] = [_component_table(validation)]
    if validation.scores:
        parts.append(_scores(validation))
    spread = validation.simulated_spread_ms
    if spread.p99 > spread.p50 or any(item.is_known for item in validation.stability):
        parts.append(_stability(validation))
    if validation.proportions:
        parts.append(_proportions(validation))
    parts.append("\n" + "\n".join(finding_lines(validation.findings)))
    return stack(*parts)


def _component_table(validation: TrainingValidation) -> Table:
    rows = [_component_row(row) for row in (validation.step, *validation.components)]
    if validation.step_raw.simulated_ms != validation.step.simulated_ms:
        raw = _component_row(validation.step_raw)
        rows.insert(1, ("  not calibrated", *raw[1:]))
    columns = ("component", "stage", "measured (ms)", "simulated (ms)", "error", "flags")
    return build_table(f"{validation.run_name} ({validation.source})", columns, rows)


def _component_row(row: ComponentComparison) -> tuple[object, ...]:
    is_simulated = row.simulated_ms > 0
    error = f"{row.error_ratio:+.1%}" if is_simulated else "-"
    return (
        row.name,
        _stage(row.stage),
        row.measured_ms,
        row.simulated_ms if is_simulated else "-",
        error if row.is_scored else f"({error})",
        row.flags,
    )


def _scores(validation: TrainingValidation) -> Table:
    rows = [
        (
            item.name,
            item.num_scored,
            item.num_flagged,
            f"{item.mean_error_ratio:+.1%}" if item.num_scored else "-",
            f"{item.mape_ratio:.1%}" if item.num_scored else "-",
        )
        for item in validation.scores
    ]
    columns = ("component", "scored", "flagged", "mean error", "without signs")
    return build_table("Errors by component", columns, rows)


def _stability(validation: TrainingValidation) -> Table:
    rows: list[tuple[object, ...]] = [
        (
            item.name,
            _stage(item.stage),
            item.num_samples or "-",
            f"{item.mean_ratio:+.1%}",
            f"{item.variation_ratio:.1%}" if item.num_samples else "-",
            f"{format_cell(item.p10_ms)} to {format_cell(item.p90_ms)}"
            if item.num_samples
            else "-",
        )
        for item in validation.stability
        if item.is_known or item.stage == ALL_STAGES
    ]
    spread = validation.simulated_spread_ms
    if spread.p99 > spread.p50:
        values = (spread.p50, spread.p90, spread.p99)
        text = " / ".join(map(format_cell, values)) + " (P50 / P90 / P99)"
        change = f"{spread.mean / validation.step.simulated_ms - 1:+.1%}"
        rows.insert(1, ("  simulated", "all", "-", change, "-", text))
    columns = ("component", "stage", "steps", "mean over it", "variation", "P10 to P90 (ms)")
    return build_table("Stability over measured steps", columns, rows)


def _proportions(validation: TrainingValidation) -> Table:
    names = list(dict.fromkeys(name for parts in validation.proportions.values() for name in parts))
    totals = {row: sum(parts.values()) for row, parts in validation.proportions.items()}
    rows = [
        (
            name,
            *(
                f"{parts.get(name, 0.0) / (totals[row] or 1.0):.1%}"
                for row, parts in validation.proportions.items()
            ),
        )
        for name in names
    ]
    return build_table("Shares of the first stage's step", ("part", *totals), rows)


def _stage(stage: int) -> str:
    return "all" if stage == ALL_STAGES else str(stage)


def _write_components(path: Path, validations: Sequence[TrainingValidation]) -> None:
    names = ("name", "stage", "measured_ms", "simulated_ms", "error_ratio", "is_scored", "flags")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("run", *names))
        writer.writerows(
            [validation.run_name, *(getattr(row, name) for name in names)]
            for validation in validations
            for row in (validation.step, *validation.components)
        )
