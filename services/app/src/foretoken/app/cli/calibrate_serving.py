"""`foretoken calibrate serving`: correct times by a measured run of a server or its steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.output_file import page_option, write_page
from foretoken.app.cli.request_options import with_option_groups
from foretoken.app.cli.state import (
    check_output_path,
    note,
    open_services,
    scenario_changes,
    show_progress,
    stack_sections,
)
from foretoken.app.compose import Composition
from foretoken.app.scenario_file import read_serving_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.correction import Correction
from foretoken.domain.requests.option import option
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.serving_run import ServingRun
from foretoken.domain.results.echo import Echo
from foretoken.domain.results.report import ServingReport
from foretoken.page.section import Section
from foretoken.simulator.validation.measured_run import load_run, scenario_of_run
from foretoken.simulator.validation.measured_steps import StepRun, load_steps
from foretoken.simulator.validation.serving_calibration import calibrate_serving
from foretoken.simulator.validation.serving_page import (
    calibration_section,
    validation_sections,
    write_calibrated,
)


@dataclass(frozen=True, kw_only=True)
class RecordedOptions:
    """What was measured: a run, or the engine's steps."""

    measured: Path | None = option(None, "The measured run: a file, or the folder a tool wrote.")
    run: str = option("", "Which of several runs in it.")
    steps: Path | None = option(
        None,
        "In place of a run, the engine's own records of its steps: forward-pass metrics of vLLM,"
        " SGLang or Dynamo (JSON lines), or SGLang's log.",
    )


@with_option_groups
def serving(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the correction; one of it is replaced.")],
    scenario: Annotated[
        Path, typer.Argument(help="Scenario file: model, device and engine of the server (YAML).")
    ],
    recorded: RecordedOptions,
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

    `--steps` learns of each kind of step by what to multiply its time and what to add, which holds
    for that model, engine, device and layout: ask with it in simulations, not in searches.

    Example: `foretoken calibrate serving my-server server.yaml --measured run.json --out my.yaml`
    """
    server = read_serving_scenario(scenario, scenario_changes(change))
    with open_services(context) as (state, services):
        run, steps = recorded.measured, recorded.steps
        if run is not None and steps is None:
            learned = _learn_of_run(load_run(run, name=recorded.run), server, name, services)
        elif steps is not None and run is None:
            learned = _learn_of_steps(load_steps(steps), server, name, services)
        else:
            raise InvalidRequestError.of_field("--measured", "give either a run or --steps")
    sections = learned.sections
    state.print_object(learned.correction, lambda: stack_sections(sections[:1]), *learned.echoes)
    if out is not None:
        out.write_text(learned.keys, encoding="utf-8")
        note(f"keys written to {out}")
    if html is not None:
        title = f"{server.model.name} on {server.device}: calibrated"
        write_page(html, title, sections, *learned.echoes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Learned:
    """A correction, what a page says of it, the first section first, and the keys to use it."""

    correction: Correction
    sections: Sequence[Section]
    keys: str
    echoes: Sequence[Echo] = ()


def _learn_of_run(
    found: ServingRun, server: ServingScenario, name: str, services: Composition
) -> _Learned:
    simulator = services.foretoken("simulator")

    def simulate(changed: ServingScenario) -> ServingReport:
        with show_progress(f"simulate {len(found.completed)} measured requests") as update:
            return simulator.simulate_serving(changed, on_progress=update)

    result = calibrate_serving(
        found, scenario_of_run(server, found), name, simulate, services.predictor
    )
    return _Learned(
        correction=result.correction,
        sections=[calibration_section(result), *validation_sections(result.calibrated)],
        keys=write_calibrated(result),
        echoes=[result.report.echo],
    )


def _learn_of_steps(
    found: StepRun, server: ServingScenario, name: str, services: Composition
) -> _Learned:
    # They need numba, which no other command should wait for.
    from foretoken.simulator.validation.step_calibration import calibrate_steps
    from foretoken.simulator.validation.step_calibration_page import step_calibration_section

    with show_progress(f"price {len(found.steps)} steps"):
        result = calibrate_steps(found, server, name, services.predictor)
    section = step_calibration_section(result)
    return _Learned(correction=result.correction, sections=[section], keys=section.listing)
