"""`foretoken validate`: how a simulation compares with what was measured."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.output_file import page_option, write_page
from foretoken.app.cli.request_options import with_option_groups
from foretoken.app.cli.state import (
    CliState,
    build_table,
    check_output_path,
    format_ratio,
    leave_unless,
    note,
    open_composition,
    scenario_changes,
    show_progress,
    stack,
    stack_sections,
    state_of,
)
from foretoken.app.cli.validate_steps import steps
from foretoken.app.installed_runs import list_installed_runs
from foretoken.app.scenario_file import read_serving_scenario, read_training_scenario
from foretoken.client.facade import Foretoken
from foretoken.domain.alias import canonical_device, canonical_model
from foretoken.domain.requests.option import option
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.serving_run import ServingRun
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.validation.measured_run import load_run, load_runs, scenario_of_run
from foretoken.simulator.validation.published_comparison import (
    PublishedOutcome,
    PublishedScore,
    compare_published,
    draw_runs,
    score_published,
)
from foretoken.simulator.validation.serving import ServingValidation, validate_serving
from foretoken.simulator.validation.serving_comparison import RequestComparison
from foretoken.simulator.validation.serving_page import sweep_sections
from foretoken.simulator.validation.training import TrainingValidation, validate_training
from foretoken.simulator.validation.training_page import training_validation_sections
from foretoken.simulator.validation.training_run import read_run

_INSTALLED, _GROUP = "installed", "Against what others measured"


@dataclass(frozen=True, kw_only=True)
class PublishedOptions:
    """Which runs that others measured a home is compared with."""

    against: str = option(
        "",
        "`installed`: simulate the runs that `catalog install nvidia` brought, or the starter, in"
        " place of one of your own; the errors are printed by model, engine and device.",
        choices=("", _INSTALLED),
        group=_GROUP,
    )
    model: str = option("", "Only runs of this model.", group=_GROUP)
    device: str = option("", "Only runs on this device.", group=_GROUP)
    runs: int = option(
        12, "Most runs of a model under an engine on a device.", minimum=1, group=_GROUP
    )


def validate_installed(state: CliState, asked: PublishedOptions) -> None:
    """Simulate a sample of the runs that are asked for, and print the errors."""
    model, device = canonical_model(asked.model), canonical_device(asked.device)
    with open_composition(state) as services:
        runs = [
            run
            for run in list_installed_runs(services.catalog, state.config.starter)
            if model in ("", run.model) and device in ("", run.device)
        ]
        if not runs:
            raise typer.BadParameter(
                "no measured runs of that kind are here: `foretoken catalog install nvidia`"
            )
        drawn = draw_runs(runs, asked.runs)
        foretoken = services.foretoken("simulator")
        outcomes: list[PublishedOutcome] = []
        with show_progress(f"simulate {len(drawn)} of {len(runs)} measured runs") as update:
            for outcome in compare_published(drawn, foretoken.simulate_serving):
                outcomes.append(outcome)
                update.set(len(outcomes) / len(drawn), outcome.run.model)
    scores = score_published(outcomes)
    rows = [_row(score) for score in scores]
    columns = ("model", "engine", "device", "runs", "TPOT error", "bias", "TTFT error", "bias")
    reasons = dict.fromkeys(
        f"{score.num_left_out} runs of {score.model} under {score.engine}: {score.reason}"
        for score in scores
        if score.reason
    )
    title = "Simulated against measured: mean errors without signs, and with them"
    state.print_object(scores, lambda: stack(build_table(title, columns, rows), *reasons))
    leave_unless(any(score.num_runs for score in scores))


def _row(score: PublishedScore) -> tuple[object, ...]:
    errors = (
        score.tpot_mape_ratio,
        score.tpot_bias_ratio,
        score.ttft_mape_ratio,
        score.ttft_bias_ratio,
    )
    shown = [format_ratio(error, score.num_runs) for error in errors]
    return score.model, score.engine, score.device, score.num_runs, *shown


app = typer.Typer(help="Compare a simulation with what was measured.", no_args_is_help=True)


app.command()(steps)


@dataclass(frozen=True, kw_only=True)
class MeasuredOptions:
    """How the file of a measured run is read."""

    format: str = option("", "Its format; found out by its content if left out.")
    run: str = option("", "Which of several runs in it; all of them if left out.")


@app.command()
@with_option_groups
def serving(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    published: PublishedOptions,
    chosen: MeasuredOptions,
    scenario: Annotated[
        Path | None,
        typer.Argument(help="Scenario file: model, device and engine of the server (YAML)."),
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="The measured run: a file, or the folder a tool wrote.")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change one key: `engine.max_num_seqs=128`.")
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
    --save-detailed`, from AIPerf (`profile_export.jsonl`), GenAI-Perf (`profile_export.json`) or
    GuideLLM (`benchmarks.json`), or be a CSV table with `arrival_s, input_tokens, output_tokens`,
    `first_token_s` or `ttft_ms`, and `last_token_s` or `e2e_ms`. Its arrivals and lengths replace
    the scenario's workload; model, device, layout and engine are the scenario's. A file of several
    runs, such as a sweep of GuideLLM's, is compared run by run.

    Example: `foretoken validate serving server.yaml --measured run.json --page comparison.html`
    """
    state = state_of(context)
    if published.against:
        validate_installed(state, published)
        return
    if scenario is None or measured is None:
        raise typer.BadParameter("give a scenario and --measured, or --against installed")
    server = read_serving_scenario(scenario, scenario_changes(change))
    runs = _read_runs(measured, chosen)
    with open_composition(state) as services:
        simulate = partial(_replay, services.foretoken("simulator"), server)
        reports = list(map(simulate, runs))
    validations = list(map(validate_serving, runs, reports))
    state.print_object(
        validations if len(runs) > 1 else validations[0],
        lambda: stack_sections(sweep_sections(validations, has_pictures=False)),
        reports[0].echo,
    )
    if requests_csv is not None:
        _write_requests(requests_csv, validations)
    if html is not None:
        title = f"{server.model.name} on {server.device}: measured and simulated"
        write_page(html, title, sweep_sections(validations), reports[0].echo)


def _read_runs(path: Path, chosen: MeasuredOptions) -> tuple[ServingRun, ...]:
    if chosen.run:
        return (load_run(path, chosen.format, chosen.run),)
    return load_runs(path, chosen.format)


def _replay(foretoken: Foretoken, server: ServingScenario, run: ServingRun) -> ServingReport:
    with show_progress(f"simulate {len(run.completed)} measured requests") as update:
        return foretoken.simulate_serving(scenario_of_run(server, run), on_progress=update)


def _write_requests(path: Path, validations: Sequence[ServingValidation]) -> None:
    """Write a line for each request; those of several runs begin with their run."""
    names = [item.name for item in fields(RequestComparison)]
    has_several = len(validations) > 1
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run"] * has_several + names)
        writer.writerows(
            [one.run_name] * has_several + [getattr(request, name) for name in names]
            for one in validations
            for request in one.requests
        )
    note(f"requests written to {path}")


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
        reports = [_simulate(foretoken, scenario) for scenario in read]
    validations = list(map(validate_training, runs, reports, read))
    echoes = [report.echo for report in reports]
    state.print_object(
        validations if len(validations) > 1 else validations[0],
        lambda: stack_sections(training_validation_sections(validations, has_pictures=False)),
        *echoes,
    )
    if components_csv is not None:
        _write_components(components_csv, validations)
        note(f"components written to {components_csv}")
    if html is not None:
        write_page(html, _title(read), training_validation_sections(validations), *echoes)


def _simulate(foretoken: Foretoken, scenario: TrainingScenario) -> TrainingReport:
    with show_progress(f"simulate {scenario.name}") as update:
        return foretoken.simulate_training(scenario, on_progress=update)


def _title(scenarios: Sequence[TrainingScenario]) -> str:
    named = [f"{item.model.name} on {item.layout.num_devices} {item.device}" for item in scenarios]
    return f"{', '.join(dict.fromkeys(named))}: measured and simulated"


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
