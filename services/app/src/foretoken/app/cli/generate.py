"""`foretoken generate`: files that start what a scenario describes, and scenarios of such files."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.state import check_output_path, fail, note, scenario_changes
from foretoken.app.cli.training_launch import check_framework, launch_scenario
from foretoken.app.scenario_file import (
    build_serving_scenario,
    build_training_scenario,
    read_training_scenario,
)
from foretoken.domain.errors import ForetokenError
from foretoken.domain.text_file import read_text
from foretoken.simulator.launch.framework import all_frameworks

app = typer.Typer(
    help="Write files that start what a scenario describes. Nothing is simulated.",
    no_args_is_help=True,
)


@app.command()
def scenario(
    device: Annotated[str, typer.Option(help="Device: see `foretoken list devices`.")],
    command: Annotated[
        str,
        typer.Option(
            "--from-command",
            help="What starts it: `vllm serve ...`, `torchrun ... pretrain_gpt.py ...`.",
        ),
    ] = "",
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--from-file",
            help="A training script, and what it reads: `train.sh`, torchtitan's `train.toml`,"
            " `deepspeed.json`. Repeatable.",
        ),
    ] = None,
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
    """Read what starts a server or a training run into a scenario, which other commands take.

    Servers are vLLM's and SGLang's, frameworks those of `generate training`. Options of a server
    that a scenario has nothing for are listed. Add the workload and limits to the file.

    - `foretoken generate scenario --from-command "vllm serve meta-llama/Llama-3.1-8B
    --tensor-parallel-size 2 --max-num-seqs 128" --device h200_sxm --out serving.yaml`

    - `foretoken generate scenario --from-file train.sh --from-file train.toml --device h100_sxm`
    """
    # What reads commands takes numeric libraries, for which help does not wait.
    from foretoken.simulator.launch.generated_file import render_scenario
    from foretoken.simulator.launch.read import read_launch

    try:
        given = {"device": device, **scenario_changes(change)}
        texts = {path.name: read_text(path, "--from-file") for path in files or ()}
        found = read_launch(command, texts, needs_model="model" not in given)
        build = build_training_scenario if found.is_training else build_serving_scenario
        path = out or Path(f"{found.framework}.yaml")
        text = render_scenario(build(dict(found.content), given, path))
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
