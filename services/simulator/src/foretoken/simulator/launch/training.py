"""Files that start a training run or a server, and the scenario that such files say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.files import (
    render,
    render_manifests,
    render_scenario,
    write_files,
)
from foretoken.simulator.launch.server import all_servers, list_read_remarks, scenario_content
from foretoken.simulator.launch.trainer import (
    MASTER_PORT,
    SCRIPT,
    LaunchedRun,
    TrainingFramework,
    all_frameworks,
    choose_framework,
    plan_job,
    read_title,
    strategy_content,
)
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.pipelines.schedule import find_schedule, with_chunks
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLaunch:
    """What a command starts: the content of a scenario file, which names no device.

    `framework` is what it starts it with, `unread` are options that a scenario has nothing for,
    `remarks` what else a reader has to know.
    """

    framework: str
    content: Mapping[str, Any]
    unread: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    is_training: bool = False


def read_launch(command: str, files: Mapping[str, str], *, needs_model: bool = True) -> ReadLaunch:
    """Return what a command starts, or a script with the files that it reads, by their names.

    Raises:
        InvalidRequestError: nothing is given, nothing that is known is started, or it says what
            no scenario can say.

    """
    scripts = [text for name, text in files.items() if name.endswith(".sh")]
    if len(scripts) + bool(command) > 1:
        raise InvalidRequestError.of_field("command", "give one command, or one script")
    started = "".join([command, *scripts])
    if not (started or files):
        raise InvalidRequestError.of_field("command", "give --from-command or --from-file")
    configs = {name: text for name, text in files.items() if not name.endswith(".sh")}
    served = read_serving_command(started, configs)
    return served or read_training({SCRIPT: started, **configs}, needs_model=needs_model)


def read_serving_command(command: str, files: Mapping[str, str] | None = None) -> ReadLaunch | None:
    """Return what the command of a server says, by the rules of the engine's newest profile.

    None where it starts no server that files are written for.

    Raises:
        InvalidRequestError: it starts a part of a deployment, or reads a file that is not given.

    """
    for server in all_servers().values():
        found = server.read(command, files)
        if found is None:
            continue
        fields, unread = found
        role = fields.get("role", "aggregated")
        if role != "aggregated":
            raise InvalidRequestError.of_field(
                "command",
                f"starts the {role} pool of a deployment; read the command of each pool without its"
                " transfer of KV caches, and join them under `cluster`",
            )
        content = scenario_content(fields, server.profile)
        return ReadLaunch(
            framework=server.name,
            content=content,
            unread=tuple(unread),
            remarks=list_read_remarks(fields),
        )
    return None


def read_training(files: Mapping[str, str], *, needs_model: bool = True) -> ReadLaunch:
    """Return what the files of a training framework say, by the rules of its own profile.

    `files` has a script or a command as `SCRIPT`, and what it reads by its name.

    Raises:
        InvalidRequestError: they start no framework that files are written for, a file is missing
            or says something that a scenario has nothing for, or no preset, or several, have the
            model's geometry, while it is needed.

    """
    frameworks = all_frameworks()
    framework = next((item for item in frameworks.values() if item.starts(files)), None)
    if framework is None:
        known = ", ".join((*all_servers(), *frameworks))
        raise InvalidRequestError.of_field("command", f"starts none of {known}")
    try:
        content = strategy_content(framework.read(files))
        models = _find_models(framework, files) if needs_model else ()
    except (LookupError, TypeError, ValueError) as err:
        raise InvalidRequestError.of_field(
            "files", f"{framework.name}: a file or an option is missing, or unknown: {err}"
        ) from err
    if needs_model and len(models) != 1:
        found = f"those of {', '.join(models)}" if models else "of no preset"
        raise InvalidRequestError.of_field(
            "model", f"its sizes are {found}: name it, as in --set model=llama-3.1-8b"
        )
    content |= {"model": "".join(models), "trainer": {"profile": framework.profiles[0]}}
    return ReadLaunch(framework=framework.name, content=content, is_training=True)


def _find_models(framework: TrainingFramework, files: Mapping[str, str]) -> Sequence[str]:
    """Return the presets of a script's sizes: the one that it names, where it is among them."""
    models, named = framework.find_models(framework.read_options(files)), read_title(files[SCRIPT])
    return (named,) if named in models else models


# Fields that no strategy changes.
_OF_ALL_LAYOUTS = ("model", "dtype")


def write_training_launch(
    scenario: TrainingScenario, folder: Path, framework: str = ""
) -> tuple[Path, ...]:
    """Write a script, the framework's files, a Kubernetes job and a README; return their paths.

    `framework` is one of `trainers/` (empty: the one that the scenario's trainer describes).

    Raises:
        InvalidRequestError: the scenario cannot run, or the framework cannot do what it says;
            every reason names its field. Or the folder cannot be written.
        UnknownPluginError: there is no such framework.

    """
    trainer = choose_framework(scenario, framework)
    check_launched(scenario)
    job = plan_job(scenario)
    launch = trainer.launch(job)
    about = {
        "job": job,
        "run": LaunchedRun.of(scenario),
        "launch": launch,
        "framework": trainer,
        "script": SCRIPT,
        "port": MASTER_PORT,
    }
    return write_files(
        folder,
        {
            **launch.files,
            "job.yaml": render_manifests("job.yaml", about),
            "kustomization.yaml": render("kustomization.yaml", {"resource": "job.yaml"}),
            "scenario.yaml": render_scenario(scenario),
            "README.md": render("training.md", about),
        },
    )


def check_launched(scenario: TrainingScenario) -> None:
    """Check that a scenario can run at all, whatever starts it.

    Raises:
        InvalidRequestError: with the reasons.

    """
    schedule = find_schedule(scenario.pipeline_schedule)
    check_scenario(scenario)
    check_chunks(chunk_ranks(with_chunks(scenario, schedule)), scenario)


def check_framework_has(scenario: TrainingScenario, framework: str = "") -> None:
    """Check that a framework has the model of a scenario and its number format, in some layout.

    `framework` is as in `write_training_launch`.

    Raises:
        InvalidRequestError: it has not, with the reasons.
        UnknownPluginError: there is no such framework.

    """
    trainer = choose_framework(scenario, framework)
    alone = replace(scenario, layout=ParallelLayout(), stage_layers=(), stage_devices=())
    try:
        trainer.launch(plan_job(alone))
    except InvalidRequestError as err:
        found = [item for item in err.violations if item.field.split(".")[0] in _OF_ALL_LAYOUTS]
        if found:
            raise InvalidRequestError.of_violations(found) from None


def check_fills_nodes(scenario: TrainingScenario, num_devices: Sequence[int]) -> None:
    """Check that one of some numbers of devices fills whole nodes, which files are written for.

    Raises:
        InvalidRequestError: none does.

    """
    problem: InvalidRequestError | None = None
    for count in num_devices:
        try:
            plan_job(replace(scenario, layout=ParallelLayout(dp=count)))
        except InvalidRequestError as err:
            problem = problem or err
        else:
            return
    if problem is not None:
        raise problem
