"""Write the files that start a training run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.files import (
    render,
    render_manifests,
    render_scenario,
    write_files,
)
from foretoken.simulator.launch.trainer import (
    MASTER_PORT,
    SCRIPT,
    LaunchedRun,
    choose_framework,
    plan_job,
)
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario
from foretoken.simulator.training.schedule import find_schedule, with_chunks

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
