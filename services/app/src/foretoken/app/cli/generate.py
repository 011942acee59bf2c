"""`foretoken generate`: files that start what a scenario describes, and scenarios of such files."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.state import check_output_path, fail, note, scenario_changes
from foretoken.app.cli.training_launch import check_framework, launch_scenario
from foretoken.app.scenario_file import build_serving_scenario, read_training_scenario
from foretoken.domain.errors import ForetokenError
from foretoken.simulator.launch.framework import all_frameworks

app = typer.Typer(
    help="Write files that start what a scenario describes. Nothing is simulated.",
    no_args_is_help=True,
)


@app.command()
def scenario(
    command: Annotated[
        str,
        typer.Option(
            "--from-command",
            help="What starts it: `vllm serve ...`, `-m sglang.launch_server ...`.",
        ),
    ],
    device: Annotated[str, typer.Option(help="Device: see `foretoken list devices`.")],
    topology: Annotated[
        str, typer.Option(help="Links between devices (default: the usual ones of the device).")
    ] = "",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of the scenario: `layout.tp=4`. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the scenario here (default: print it).", callback=check_output_path
        ),
    ] = None,
) -> None:
    """Read what starts a server into a scenario, which every other command takes.

    Options that a scenario has nothing for are listed. Add the workload and limits to the file.

    Example: `foretoken generate scenario --from-command "vllm serve meta-llama/Llama-3.1-8B
    --tensor-parallel-size 2 --max-num-seqs 128" --device h200_sxm --out serving.yaml`
    """
    # What reads commands takes numeric libraries, for which help does not wait.
    from foretoken.simulator.launch.generated_file import render_scenario
    from foretoken.simulator.launch.read import read_serving_command

    try:
        found = read_serving_command(command)
        given = {"device": device, "topology": topology, **scenario_changes(change)}
        name = out or Path(f"{found.framework}.yaml")
        text = render_scenario(build_serving_scenario(dict(found.content), given, name))
    except ForetokenError as err:
        fail(err)
    if found.unread:
        note(f"not read: {', '.join(f'--{name}' for name in found.unread)}")
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        note(f"scenario written to {out}")


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
