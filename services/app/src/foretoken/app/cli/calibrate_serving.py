"""`foretoken calibrate serving`: correct operators' times by a measured run of a server."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.output_file import page_option, write_page
from foretoken.app.cli.state import (
    check_output_path,
    note,
    open_services,
    scenario_changes,
    show_progress,
    stack_sections,
)
from foretoken.app.scenario_file import read_serving_scenario
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import ServingReport
from foretoken.simulator.validation.measured_run import load_run, scenario_of_run
from foretoken.simulator.validation.serving_calibration import calibrate_serving
from foretoken.simulator.validation.serving_page import (
    calibration_section,
    validation_sections,
    write_calibrated,
)


def serving(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the correction; one of it is replaced.")],
    scenario: Annotated[
        Path, typer.Argument(help="Scenario file: model, device and engine of the server (YAML).")
    ],
    measured: Annotated[
        Path, typer.Option(help="The measured run: a file, or the folder a tool wrote.")
    ],
    run: Annotated[str, typer.Option(help="Which of several runs in it.")] = "",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of the scenario: `engine.max_num_seqs=128`."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the keys that scenarios of this server have then (YAML).",
            callback=check_output_path,
        ),
    ] = None,
    html: Annotated[Path | None, page_option("--html")] = None,
) -> None:
    """Learn from a measured run of a server how far operators' times and the front end are off.

    Steps of a batch, measured and simulated, give a factor for each group of operators, as far as
    they tell them apart; what is missing before the first token is the front end's. Then ask with
    `--set correction=NAME`, in simulations and searches on that device.

    Example: `foretoken calibrate serving my-server server.yaml --measured run.json --out my.yaml`
    """
    with open_services(context) as (state, services):
        found = load_run(measured, name=run)
        server = read_serving_scenario(scenario, scenario_changes(change))
        simulator = services.foretoken("simulator")

        def simulate(changed: ServingScenario) -> ServingReport:
            with show_progress(f"simulate {len(found.completed)} measured requests") as update:
                return simulator.simulate_serving(changed, on_progress=update)

        result = calibrate_serving(
            found, scenario_of_run(server, found), name, simulate, services.predictor
        )
    sections = [calibration_section(result), *validation_sections(result.calibrated)]
    state.print_object(result.correction, lambda: stack_sections(sections[:1]), result.report.echo)
    if out is not None:
        out.write_text(write_calibrated(result), encoding="utf-8")
        note(f"keys written to {out}")
    if html is not None:
        title = f"{server.model.name} on {server.device}: calibrated"
        write_page(html, title, sections, result.report.echo)
