"""`foretoken generate`: files that start what a scenario describes, and scenarios of such files."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.state import check_output_path, note, scenario_changes
from foretoken.app.scenario_file import (
    build_serving_scenario,
    build_training_scenario,
    read_training_scenario,
)
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.option import option
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    StrategyFinalist,
    TrainingSearchReport,
    TrainingSearchRequest,
)
from foretoken.domain.text_file import read_text
from foretoken.simulator.launch.trainer import all_frameworks, choose_framework

_PANEL = "Results"
app = typer.Typer(
    help="Write files that start what a scenario describes. Nothing is simulated.",
    no_args_is_help=True,
)


def check_framework(name: str) -> str:
    """Return the name of a framework; refused before anything is simulated."""
    if name and name not in all_frameworks():
        raise typer.BadParameter(f"{name!r} is none of {', '.join(all_frameworks())}")
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Where files that start the best strategy go, and for which framework."""

    generate: Path | None = option(
        None,
        "Write what starts the best strategy here: a script with the framework's options,"
        " its files, a Kubernetes job. Needs finalists.",
        syntax="folder",
        group=_PANEL,
    )
    framework: str = option(
        "",
        f"With --generate: {', '.join(all_frameworks())} (default: the trainer's own).",
        group=_PANEL,
    )

    def check(self, *, has_finalists: bool) -> None:
        """Refuse options that cannot be followed, before a search.

        Raises:
            typer.BadParameter: they cannot.

        """
        check_framework(self.framework)
        if self.generate is None and self.framework:
            raise typer.BadParameter("--framework is of --generate DIR")
        if self.generate is not None and not has_finalists:
            raise typer.BadParameter("--generate needs a simulated strategy: --finalists 1 or more")

    def bound_request(self, request: TrainingSearchRequest) -> TrainingSearchRequest:
        """Return a search bounded by what the framework can run, with a note of its name.

        Raises:
            InvalidRequestError: it has not the model or its number format, the devices fill no
                whole nodes, or all pipelines have devices of several types.

        """
        if self.generate is None:
            return request
        # Most searches write none, and what writes them takes numeric libraries.
        from foretoken.simulator.launch.training import (
            check_fills_nodes,
            check_framework_has,
        )

        check_framework_has(request.scenario, self.framework)
        framework = choose_framework(request.scenario, self.framework)
        profile = request.scenario.trainer.profile
        if profile not in framework.profiles[:1]:
            note(
                f"files are written for {framework.name}: what it cannot run is left out; times are"
                f" by the rules of {profile}, not of {framework.profiles[0]}"
            )
        space = request.space
        if not (space.node_groups or space.devices):
            sizes = space.num_devices or (request.scenario.layout.num_devices,)
            check_fills_nodes(request.scenario, sizes)
        devices = dict.fromkeys(group.device for group in space.node_groups)
        if len(devices) > 1 and not space.has_subsets:
            raise InvalidRequestError.of_field(
                "--generate",
                f"no framework runs a pipeline over {' and '.join(devices)}: leave it out, or add"
                " --subsets, which also tries one type alone",
            )
        return replace(request, space=replace(space, framework=framework.name))


def launch_scenario(scenario: TrainingScenario, folder: Path, framework: str = "") -> None:
    """Write the files of a scenario, and tell of them.

    Raises:
        InvalidRequestError: the framework cannot do what the scenario says.

    """
    # Most searches write none, and what writes them takes numeric libraries.
    from foretoken.simulator.launch.training import write_training_launch

    paths = write_training_launch(scenario, folder, framework)
    note(f"{scenario.name} written to {folder}: {', '.join(path.name for path in paths)}")


def launch_best(report: TrainingSearchReport, options: GenerateOptions) -> None:
    """Write the files of the best finalist that fits and that the framework can run.

    Better ones that it cannot run are named, with the reasons. Without `generate` nothing is done.

    Raises:
        InvalidRequestError: no finalist fits, or the framework can run none; then the reasons are
            those of the best.

    """
    if options.generate is None:
        return
    refusals: list[InvalidRequestError] = []
    for finalist in _list_fitting(report):
        scenario = schema.decode(TrainingScenario, json.loads(finalist.scenario_json))
        try:
            launch_scenario(scenario, options.generate, options.framework)
        except InvalidRequestError as err:
            refusals.append(err)
            note(f"{finalist.name} cannot be written: {err}")
        else:
            return
    raise refusals[0]


def _list_fitting(report: TrainingSearchReport) -> list[StrategyFinalist]:
    fitting = sorted(
        (finalist for finalist in report.finalists if finalist.rank > 0),
        key=lambda finalist: finalist.rank,
    )
    if not fitting:
        reason = (
            "no finalist fits when it is simulated: simulate more (--finalists)"
            if report.finalists
            else "nothing was simulated that could be written: no strategy qualifies"
        )
        raise InvalidRequestError.of_field("--generate", reason)
    return fitting


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

    Servers are those of vLLM, SGLang and TensorRT-LLM, frameworks those of `generate training`.
    Options of a server that a scenario has nothing for are listed. Add the workload and limits to
    the file.

    - `foretoken generate scenario --from-command "vllm serve meta-llama/Llama-3.1-8B
    --tensor-parallel-size 2 --max-num-seqs 128" --device h200_sxm --out serving.yaml`

    - `foretoken generate scenario --from-file train.sh --from-file train.toml --device h100_sxm`
    """
    # What reads commands takes numeric libraries, for which help does not wait.
    from foretoken.simulator.launch.files import render_scenario
    from foretoken.simulator.launch.training import read_launch

    given = {"device": device, **scenario_changes(change)}
    texts = {path.name: read_text(path, "--from-file") for path in files or ()}
    found = read_launch(command, texts, needs_model="model" not in given)
    build = build_training_scenario if found.is_training else build_serving_scenario
    path = out or Path(f"{found.framework}.yaml")
    text = render_scenario(build(dict(found.content), given, path))
    if found.unread:
        note(f"not read: {', '.join(f'--{name}' for name in found.unread)}")
    for remark in found.remarks:
        note(remark)
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
    resolved = read_training_scenario(scenario, scenario_changes(change))
    launch_scenario(resolved, out, framework)
