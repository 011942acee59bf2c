"""`foretoken generate`: files that start what a scenario describes."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.state import fail, scenario_changes
from foretoken.app.cli.training_launch import check_framework, launch_scenario
from foretoken.app.scenario_file import read_training_scenario
from foretoken.domain.errors import ForetokenError
from foretoken.simulator.launch.framework import all_frameworks

app = typer.Typer(
    help="Write files that start what a scenario describes. Nothing is simulated.",
    no_args_is_help=True,
)


@app.callback()
def generate() -> None:
    """Keep `training` a command of its own."""


@app.command()
def training(
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    out: Annotated[
        Path, typer.Option(help="Folder for the files; made where it is not there.")
    ] = Path("training"),
    framework: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(all_frameworks())} (default: the one the trainer describes).",
            callback=check_framework,
        ),
    ] = "",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of the scenario: `layout.pp=4`. Repeatable."),
    ] = None,
) -> None:
    """Write a training scenario as a script, the framework's own files and a Kubernetes job.

    Every option written is one that the framework documents. What it cannot do is an error that
    names the key of the scenario, and what can be done instead.

    Example: `foretoken generate training docs/examples/training.yaml --framework megatron-core
    --out training`
    """
    try:
        resolved = read_training_scenario(scenario, scenario_changes(change))
        launch_scenario(resolved, out, framework)
    except ForetokenError as err:
        fail(err)
